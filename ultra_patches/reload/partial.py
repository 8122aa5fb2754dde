"""Finish a layer of which a session carries only a part: the rest keeps its values, or nothing of the layer changes.

`layerwise` is vLLM's reload.layerwise throughout. Imported only where that is, because it needs torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from ultra_patches.errors import UltraPatchesError
from ultra_patches.reload.direct import DirectWrite
from ultra_patches.reload.regions import Region, Writes, unwritten
from ultra_patches.reload.upstream import LayerInfo, never_counted


class KeepError(UltraPatchesError):
    """The kernel format of a layer does not allow to keep what was not sent."""


def is_complete(layerwise: ModuleType, layer: torch.nn.Module, info: LayerInfo) -> bool:
    """Whether every element that can be loaded was sent."""
    if info.load_numel < (info.load_numel_total or 0):
        return False
    names = set(layerwise.get_layer_tensors(layer)).difference(never_counted(layerwise))
    return names <= {name for name, _ in info.loaded_weights}


def finish(
    layerwise: ModuleType, layer: torch.nn.Module, info: LayerInfo, direct: Sequence[tuple[int, DirectWrite]] = ()
) -> None:
    """What `_layerwise_process` does, over the old values instead of over uninitialised memory.

    `direct` is what was written past the loaders, each with the number of weights that the loaders were handed before.

    A parameter that is not wholly sent starts from its kernel tensor, which is right where both formats are the same.
    Whether they are is seen afterwards: processing must have left the old elements as they were. Raises KeepError, with
    the old tensors back in their places, where it has not.
    """
    parameters, buffers = info.kernel_tensors or ({}, {})
    old: dict[str, torch.Tensor] = {**parameters, **buffers}
    method: Any = getattr(layer, "quant_method", None)
    processed = isinstance(method, layerwise.QuantizeMethodBase)
    state = dict(vars(method)) if processed else {}
    try:
        _materialize(layerwise, layer, info)
        missing = _load(layerwise, layer, info, old, direct)
        if processed:
            vars(layer).pop("_already_called_process_weights_after_loading", None)
            method.process_weights_after_loading(layer)
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()
            _check_kept(layer, old, missing)
    except BaseException:
        if processed:
            vars(method).clear()
            vars(method).update(state)
        layerwise._place_kernel_tensors(layer, info)
        info.reset()
        raise
    for name, kernel in old.items():
        new = layerwise.get_layer_tensors(layer).get(name)
        if new is not None and new is not kernel:
            kernel.data.copy_(new)
    layerwise._place_kernel_tensors(layer, info)
    info.reset()


def _materialize(layerwise: ModuleType, layer: torch.nn.Module, info: LayerInfo) -> None:
    # Without the info until 0.18.
    takes_info = len(inspect.signature(layerwise.materialize_layer).parameters) > 1
    layerwise.materialize_layer(layer, info) if takes_info else layerwise.materialize_layer(layer)


def _load(
    layerwise: ModuleType,
    layer: torch.nn.Module,
    info: LayerInfo,
    old: Mapping[str, torch.Tensor],
    direct: Sequence[tuple[int, DirectWrite]],
) -> dict[str, torch.Tensor | None]:
    """Load what was sent over the old values. Gives, for each tensor that was not wholly sent, the mask of the rest.

    None stands for a mask of everything.
    """
    tensors = layerwise.get_layer_tensors(layer)
    regions: dict[str, set[Region]] = {}
    for name, tensor in tensors.items():
        kernel = old.get(name)
        if kernel is not None and kernel is not tensor and _alike(kernel, tensor):
            tensor.data.copy_(kernel)
        tensor.weight_loader = layerwise._get_original_loader(tensor)
    marks: dict[str, torch.Tensor] = {}
    writes = Writes(fills=True)
    waiting = list(direct)
    for number, (name, args) in enumerate([*info.loaded_weights, ("", None)]):
        while waiting and (args is None or waiting[0][0] <= number):
            _redo(waiting.pop(0)[1], tensors, regions, marks)
        if args is not None:
            param = getattr(layer, name)
            args.arguments["param"] = param
            with writes.of(param):
                param.weight_loader(*args.args, **args.kwargs)
            regions.setdefault(name, set()).update(writes.regions)
    masks = {name: unwritten(tensor, regions[name]) if name in regions else None for name, tensor in tensors.items()}
    for name, mark in marks.items():
        mask = masks[name]
        masks[name] = ~mark if mask is None else mask & ~mark
    missing = {name: mask for name, mask in masks.items() if mask is None or mask.any()}
    # What has no kernel tensor at all is scratch of the loading.
    lost = [n for n in missing if n in old and not _alike(old[n], tensors[n])]
    lost += [n for n in missing if n not in old and n in layer._parameters]
    if lost:
        raise KeepError(_refusal(layer, {name: missing[name] for name in lost}))
    return missing


def _redo(
    write: DirectWrite,
    tensors: Mapping[str, torch.Tensor],
    regions: dict[str, set[Region]],
    marks: dict[str, torch.Tensor],
) -> None:
    write.redo(tensors)
    tensor = tensors[write.name]
    if write.region is not None and write.args[0].dtype is tensor.dtype:
        offset, shape, strides = write.region
        regions.setdefault(write.name, set()).add((offset + tensor.storage_offset(), shape, strides))
        return
    mark = write.mark(tensor)
    if mark is not None:
        marks[write.name] = mark | marks.get(write.name, torch.zeros_like(mark))


def _check_kept(
    layer: torch.nn.Module, old: Mapping[str, torch.Tensor], missing: Mapping[str, torch.Tensor | None]
) -> None:
    """Raise KeepError where processing has changed what was not sent."""
    changed = {}
    for name, mask in missing.items():
        new = {**layer._parameters, **layer._buffers}.get(name)
        if name not in old or new is None:
            continue
        kept = _alike(old[name], new) and _same(old[name].data, new.data, mask)
        if not kept:
            changed[name] = mask
    if changed:
        raise KeepError(_refusal(layer, changed))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def _same(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits where the mask is set: a NaN is no difference."""
    if mask is not None:
        one, other = one[mask], other[mask]
    return bool(torch.equal(_bytes(one), _bytes(other)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _refusal(layer: torch.nn.Module, lost: Mapping[str, torch.Tensor | None]) -> str:
    name = getattr(layer, "prefix", None) or getattr(layer, "layer_name", None) or "a layer without a prefix"
    parts = [f"{n} (all)" if mask is None else f"{n} ({int(mask.sum())} elements)" for n, mask in lost.items()]
    return (
        f"weight update refused for {name} ({type(layer).__name__}): the session does not carry {', '.join(parts)}, and "
        "what the layer computes with is repacked, so that the old values cannot be kept. The layer is unchanged. Send "
        "everything of this layer in one session"
    )
