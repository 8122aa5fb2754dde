"""CPU only: what lets Megatron-Core train without a GPU. Not imported where there is one.

Calls that name CUDA get the CPU. Which layers Megatron builds is in `plain_layers`.
"""

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Nothing:
    """A CUDA stream, an event or a context that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass


class _OnCpu(TorchFunctionMode):
    """Gives the CPU to calls that name CUDA as a text, as Megatron's optimizer and schedules do."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer sorts parameters by these names.
            return function(*args).replace("torch.", "torch.cuda.", 1)
        return function(*(CPU if _is_cuda(argument) else argument for argument in args), **kwargs)


def _is_cuda(argument: Any) -> bool:
    return isinstance(argument, (str, torch.device)) and str(argument).partition(":")[0] == "cuda"


def prepare() -> None:
    """Send CUDA calls of this process to the CPU. Call it before Megatron is imported, once."""
    for name, value in {
        # Megatron takes whatever this gives as `device=`.
        "current_device": lambda: CPU,
        "set_device": lambda _: None,
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
        # Ranks that hold the same adapters must begin with the same values.
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda _="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, _="cuda": torch.set_rng_state(state),
        "current_stream": _Nothing,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": _Nothing,
        "Event": _Nothing,
    }.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    _OnCpu().__enter__()
    import megatron.core.tensor_parallel.random as rng

    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
