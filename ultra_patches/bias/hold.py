"""Hold the fp32 buffers of MoE routers across a conversion of the whole model to bf16 or fp16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ultra_patches.bias.rule import BIAS_NAMES, warn_if_rounded


@dataclass(frozen=True)
class Held:
    """A copy of one fp32 buffer, the module that owns it and its name there."""

    owner: Any
    name: str
    buffer: Any


def hold(modules: Iterable[Any]) -> list[Held]:
    """Every fp32 router bias of the given modules. One that is rounded already is named in a warning and passed on."""
    import torch

    held = []
    for module in modules:
        for path, owner in module.named_modules():
            for name in BIAS_NAMES & owner._buffers.keys():
                buffer = owner._buffers[name]
                if buffer is None or buffer.is_meta:
                    continue
                warn_if_rounded(f"{path}.{name}", buffer)
                if buffer.dtype is torch.float32:
                    # A copy: a wrapper may convert the data of the very tensor.
                    held.append(Held(owner, name, buffer.detach().clone()))
    return held


def put_back(held: Iterable[Held]) -> None:
    """Give each buffer its values back, on the device where it is now and in the tensor that the module now has."""
    for one in held:
        converted = one.owner._buffers.get(one.name)
        if converted is not None and not converted.is_meta:
            converted.data = one.buffer.to(converted.device)
