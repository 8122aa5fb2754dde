"""vLLM's layerwise reload as the rest of this room uses it, and what differs between releases 0.16 and 0.33.

Upstream: `vllm/model_executor/model_loader/reload/{layerwise,meta,types}.py`.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

META = "vllm.model_executor.model_loader.reload.meta"
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"

#: Parameters and buffers of one layer, by name.
LayerTensors: TypeAlias = "tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]"


class LayerInfo(Protocol):
    """What vLLM keeps of one layer: `LayerReloadingInfo`."""

    #: As the layer was made, on the meta device.
    restore_metadata: LayerTensors
    #: What the layer computes with; None where the model is loaded for the first time.
    kernel_tensors: LayerTensors | None
    #: Elements that were loaded in this session, and that can be.
    load_numel: int
    load_numel_total: int | None
    #: Weights that wait until the layer is complete: the parameter's name and the loader's arguments.
    loaded_weights: list[tuple[str, inspect.BoundArguments]]

    def reset(self) -> None:
        """Forget the session; keep the metadata."""


def is_open(info: LayerInfo) -> bool:
    """Whether a layer takes weights by a loader of the session or of its first load."""
    takes: Any = getattr(info, "can_load", None) or info.can_process  # type: ignore[attr-defined] # can_process until 0.18
    return bool(takes())


def is_waiting(info: LayerInfo) -> bool:
    """Whether a layer waits for weights of a session. A model that is loaded for the first time has no kernel tensors."""
    return info.kernel_tensors is not None and is_open(info)


def never_counted(layerwise: ModuleType) -> frozenset[str]:
    """Names of tensors that a layer is complete without."""
    # In 0.20 to 0.26 these are those that are never moved to the meta device; up to 0.19 only reload.meta has them.
    names: Any = getattr(layerwise, "SKIP_LOAD_TENSORS", None) or getattr(layerwise, "SKIP_TENSORS", ())
    return frozenset(names)


def is_attention(layerwise: ModuleType, layer: torch.nn.Module) -> bool:
    """Whether upstream processes a layer at the session's end, after all others."""
    deferred = getattr(layerwise, "is_deferred_attention_layer", None)
    if deferred is not None:
        return bool(deferred(layer))
    return isinstance(layer, (layerwise.Attention, layerwise.MLAAttention))
