"""What the probes of the layerwise reload share: real sessions on toy layers, with uninitialised memory made visible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ultra_patches.reload.upstream import LAYERWISE

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that a parameter nobody loaded cannot look right by chance."""
    import torch

    fill = torch.utils.deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def parameter(*shape: int, value: float = 0.0) -> torch.nn.Parameter:
    """An fp32 parameter without gradient."""
    import torch

    return torch.nn.Parameter(torch.full(shape, value, device="cpu"), requires_grad=False)


def load(model: torch.nn.Module, weights: Sequence[tuple[Any, ...]]) -> None:
    """Hand weights to the loaders, as every model's `load_weights` does: the parameters are looked up once.

    A weight is a name, a tensor, and what its loader takes besides, such as the shard.
    """

    def copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    parameters = dict(model.named_parameters())
    for name, value, *more in weights:
        target = parameters[name]
        getattr(target, "weight_loader", copy)(target, value, *more)


def update(model: torch.nn.Module, *chunks: Sequence[tuple[Any, ...]]) -> None:
    """One weight-update session on the installed vLLM: initialize, load every chunk, finalize."""
    begin(model)
    for chunk in chunks:
        load(model, chunk)
    finish(model)


def begin(model: torch.nn.Module) -> None:
    """Start a session on the installed vLLM."""
    import importlib

    layerwise: Any = importlib.import_module(LAYERWISE)
    layerwise.initialize_layerwise_reload(model)


def finish(model: torch.nn.Module) -> None:
    """End a session on the installed vLLM."""
    import importlib

    layerwise: Any = importlib.import_module(LAYERWISE)
    layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=None, quantization=None))


def record(model: torch.nn.Module) -> None:
    """What vLLM's model loader does once, before the first load."""
    import importlib

    layerwise: Any = importlib.import_module(LAYERWISE)
    layerwise.record_metadata_for_reloading(model)
