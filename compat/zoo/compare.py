"""Everything of a model that holds numbers, and what two models have that is not the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Whatever hangs on a module or its quant method: parameters, buffers, attributes, and what is in lists and dicts."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        kept = {**module._parameters, **module._buffers, **{n: v for n, v in vars(module).items() if n[0] != "_"}}
        method = getattr(module, "quant_method", None)
        kept |= {f"quant_method.{n}": v for n, v in getattr(method, "__dict__", {}).items()}
        for name, value in kept.items():
            _add(found, f"{path}.{name}" if path else name, value)
    return found


def _add(found: dict[str, torch.Tensor], name: str, value: Any, depth: int = 0) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, (list, tuple, dict)) and depth < 3:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _add(found, f"{name}[{key}]", inner, depth + 1)


def copies(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values in memory of their own."""
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def differ(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that only one has, or whose shape, dtype or bits are not the same."""
    both = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in both if not _same(one[name], other[name])})


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta != other.is_meta:
        return False
    return one.is_meta or bool(torch.equal(_bits(one), _bits(other)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:  # packed for oneDNN
        tensor = tensor.to_dense()
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def addresses(model: Any) -> dict[str, int]:
    """Where parameters and buffers lie: CUDA graphs read them there."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named if not tensor.is_meta and tensor.layout is torch.strided}
