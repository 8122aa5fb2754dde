"""Stand-ins that let vLLM's CUDA IPC engines run on a machine without a GPU: memory-mapped files for shared buffers.

For probes and tests, in processes of their own. The engines themselves, their process groups and their messages are real.
A handle has the 15 arguments of torch's `rebuild_cuda_tensor` in its order, with a path where the IPC handle would be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class CpuIpc:
    """One rank's or worker's view of the stand-ins: the folder of the shared files, and which GPU it pretends to own."""

    def __init__(self, folder: Path, gpu: int) -> None:
        self.folder = folder
        self.gpu = gpu
        self._paths: dict[int, str] = {}
        self._numbers = itertools.count()

    def install(self, *modules: Any) -> None:
        """Replace what touches CUDA in torch and in the given vLLM modules. The process is not of use afterwards."""
        import torch
        from torch.multiprocessing import reductions

        def nothing(*_: Any, **__: Any) -> None:
            return None

        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(uuid=f"GPU-{self.gpu}")
        torch.accelerator.current_device_index = lambda: self.gpu
        torch.cuda.current_device = lambda: self.gpu
        torch.cuda.synchronize = torch.cuda.ipc_collect = torch.accelerator.synchronize = nothing
        stream = SimpleNamespace(synchronize=nothing)
        torch.cuda.current_stream = lambda *_: stream
        torch.accelerator.current_stream = lambda *_: stream
        torch.empty = self._shared_on_cuda(torch.empty)
        for module in (reductions, *modules):
            if hasattr(module, "reduce_tensor"):
                module.reduce_tensor = self.reduce
            if hasattr(module, "rebuild_cuda_tensor"):
                module.rebuild_cuda_tensor = rebuild

    def _shared_on_cuda(self, empty: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*size: Any, **options: Any) -> Any:
            if str(options.get("device")) != "cuda":
                return empty(*size, **options)
            import torch

            path = self._new_path()
            tensor = torch.from_file(path, shared=True, size=int(size[0]), dtype=options["dtype"])
            self._paths[tensor.data_ptr()] = path
            return tensor

        return allocate

    def _new_path(self) -> str:
        return str(self.folder / f"gpu{self.gpu}-{next(self._numbers)}")

    def reduce(self, tensor: Any) -> tuple[Any, tuple[Any, ...]]:
        """A handle on a tensor: on the shared file it lives in, or on a copy of it."""
        import torch

        nbytes = tensor.numel() * tensor.element_size()
        path = self._paths.get(tensor.data_ptr())
        if path is None:
            path = self._new_path()
            if nbytes:
                copy = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
                copy.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        arguments = (torch.Tensor, size, stride, 0, torch.UntypedStorage, tensor.dtype, self.gpu, path, nbytes)
        return rebuild, (*arguments, 0, False, b"", 0, b"", False)


def rebuild(*arguments: Any) -> Any:
    """The tensor behind a handle, sharing its memory. Raises TypeError for what is no handle."""
    import torch

    _, size, _, _, _, dtype, _, path, nbytes, *_ = arguments
    if not isinstance(path, str):
        raise TypeError(f"no handle: {path!r}")
    if not nbytes:
        return torch.empty(size, dtype=dtype)
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8).view(dtype).view(size)
