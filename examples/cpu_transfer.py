"""A weight-transfer backend of vLLM for machines without a GPU: tensors travel in memory-mapped files.

It takes the part that CUDA IPC has on GPUs, within vLLM's own session of start_weight_update,
update_weights and finish_weight_update. Start an engine with `LLM(model, **ENGINE_ARGS)`, then send each
chunk as `llm.update_weights({"update_info": pack(path, tensors)})`.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "shared_file"


def pack(path: str | Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write the tensors' bytes back to back into the file at `path` and return the update_info for it.

    Tensors may have any shape, dtype and device. The file must stay until update_weights has returned.
    """
    target = Path(path).resolve()
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    # A new file each time: a worker still maps the old one until its session is finished.
    partial = target.with_name(target.name + ".partial")
    with partial.open("wb") as file:
        for part in flat:
            file.write(memoryview(part.numpy()))
    partial.replace(target)
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "sizes": [part.numel() for part in flat],
        "path": str(target),
    }


@dataclass
class SharedFileInitInfo(WeightTransferInitInfo):
    """Empty: a file needs no rendezvous."""


@dataclass
class SharedFileUpdateInfo(WeightTransferUpdateInfo):
    """What `pack` returns: one entry of each list a tensor, sizes in bytes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    sizes: list[int]
    path: str

    def __post_init__(self) -> None:
        counts = {len(self.names), len(self.dtype_names), len(self.shapes), len(self.sizes)}
        if counts != {len(self.names)} or not sum(self.sizes):
            raise ValueError("names, dtype_names, shapes and sizes: expected equal lengths and some bytes")


def unpack(info: SharedFileUpdateInfo) -> list[tuple[str, Tensor]]:
    """(name, CPU tensor) pairs over a private mapping of the file, which each tensor keeps alive."""
    total = sum(info.sizes)
    if (found := Path(info.path).stat().st_size) != total:
        raise ValueError(f"{info.path} holds {found} bytes, its update_info describes {total}")
    buffer = torch.from_file(info.path, shared=False, size=total, dtype=torch.uint8)
    parts = torch.split(buffer, info.sizes)
    pairs: list[tuple[str, Tensor]] = []
    for name, dtype_name, shape, part, end in zip(
        info.names, info.dtype_names, info.shapes, parts, accumulate(info.sizes), strict=True
    ):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype) or prod(shape) * dtype.itemsize != part.numel():
            raise ValueError(f"{name}: {dtype_name} {shape} does not fill {part.numel()} bytes")
        # An odd number of bf16 before an fp32 tensor: torch refuses such a view, a copy is aligned.
        aligned = part.clone() if (end - part.numel()) % dtype.itemsize else part
        pairs.append((name, aligned.view(dtype).view(shape)))
    return pairs


class SharedFileEngine(WeightTransferEngine[SharedFileInitInfo, SharedFileUpdateInfo]):
    """The worker's side: loads checkpoint-format chunks by vLLM's layerwise reload, like its IPC engine."""

    init_info_cls = SharedFileInitInfo
    update_info_cls = SharedFileUpdateInfo

    def init_transfer_engine(self, init_info: SharedFileInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Move the layers to the meta device and let their loaders buffer what arrives."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedFileUpdateInfo) -> None:
        """Load one chunk into the model."""
        load = cast("Callable[[Iterable[tuple[str, Tensor]]], object]", self.model.load_weights)
        load(unpack(update_info))

    def finish_weight_update(self) -> None:
        """Process the layers that are still waiting and put the kernels' tensors back."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finish: Callable[..., None] = finalize_layerwise_reload
        finish(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Asked for up to vLLM 0.26; here the trainer calls `pack`."""
        raise NotImplementedError("call examples.cpu_transfer.pack and update_weights")


class WorkerExtension:
    """Empty: vLLM imports this module in every worker to find it, and the import registers the backend."""


ENGINE_ARGS: dict[str, Any] = {
    "weight_transfer_config": {"backend": BACKEND},
    "worker_extension_cls": f"{__name__}.{WorkerExtension.__qualname__}",
}

# Registered already where the module was imported under a second name.
with contextlib.suppress(ValueError):
    WeightTransferEngineFactory.register_engine(BACKEND, SharedFileEngine)
