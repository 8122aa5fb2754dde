"""A parameter that was registered after the model was made has no place in a reload: AttributeError."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload.toys import LAYERWISE, META, load, parameter, poisoned, record, session


def build_restore(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def restore_layer_on_meta(layer: Any, info: Any) -> None:
        # Where the layer is processed, what it has more than at its making may be a product of that; there it was
        # recorded before the processing, by the other function.
        if not _is_processed(layer):
            _record_late(module, layer, info)
        original(layer, info)

    return restore_layer_on_meta


def build_process(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def process_weights_after_loading(model: Any, *args: Any, **kwargs: Any) -> None:
        meta, layerwise = importlib.import_module(META), importlib.import_module(LAYERWISE)
        for layer in model.modules():
            # Online quantisation has processed its layers by now.
            if not getattr(layer, "_already_called_process_weights_after_loading", False):
                _record_late(meta, layer, layerwise.get_layerwise_info(layer))
        original(model, *args, **kwargs)

    return process_weights_after_loading


def _is_processed(layer: Any) -> bool:
    return getattr(layer, "quant_method", None) is not None or hasattr(layer, "process_weights_after_loading")


def _record_late(meta: ModuleType, layer: Any, info: Any) -> None:
    """Add what the layer has more than when it was recorded, as upstream records it. `meta` is vLLM's reload.meta."""
    if type(layer).__name__ in meta.SKIP_MODULES:
        return
    for kind, (now, recorded) in enumerate(
        zip((layer._parameters, layer._buffers), info.restore_metadata, strict=True)
    ):
        late = {n for n, tensor in now.items() if tensor is not None and n not in meta.SKIP_TENSORS} - set(recorded)
        if late and kind == 1:
            late -= set(_views(layer))
        for name in late:
            recorded[name] = meta.sanitize_layer_refs(meta.to_meta_tensor(now[name]), layer)


def _views(layer: Any) -> list[str]:
    """Non-persistent buffers that share a parameter's memory: they follow it and are never loaded."""
    storages = {p.untyped_storage().data_ptr() for p in layer.parameters() if not p.is_meta}
    own = {n: layer._buffers[n] for n in layer._non_persistent_buffers_set if layer._buffers.get(n) is not None}
    return [n for n, b in own.items() if not b.is_meta and b.untyped_storage().data_ptr() in storages]


def probe() -> Finding:
    """Register a bias and another parameter after the model was recorded, and reload them."""
    import torch

    two = torch.full((2,), 2.0)
    with poisoned(), torch.device("cpu"):
        layer = torch.nn.Module()
        layer.weight = parameter(2)
        record(layer)
        layer.bias, layer.sink = parameter(2), parameter(2)
        sent = [(name, two) for name in ("weight", "bias", "sink")]
        load(layer, [(name, torch.ones(2)) for name, _ in sent])
        try:
            session(layer, sent)
        except (AttributeError, KeyError) as error:
            return Finding(Verdict.DEFECT, f"a reload with a late bias and sink: {type(error).__name__}: {error}")
        wrong = [name for name, _ in sent if layer.get_parameter(name).tolist() != [2.0, 2.0]]
    if wrong:
        return Finding(Verdict.DEFECT, f"{', '.join(wrong)} not as sent")
    return Finding(Verdict.CLEAN, "late parameters are reloaded as sent")


PATCH = Patch(
    id="vllm-reload-late-parameters",
    title="A parameter that was registered late can be reloaded",
    upstream="vllm",
    description=(
        "What a layer has is recorded when the model is made. A parameter that is registered afterwards (a bias up to 0.26, "
        "an attention sink, whatever a plug-in adds) is taken off the layer by a session and not put on the meta device, so "
        "that its weights find no parameter, or the end of the layer an AttributeError."
    ),
    who="models, quantisation methods and plug-ins that register parameters after the model was made",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/pull/49586",
    upstream_pr="https://github.com/vllm-project/vllm/pull/49586",
    pr_state="merged for `bias` alone, in 0.27.0",
    removal="upstream records parameters when a session starts, or before it processes them",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(META, "restore_layer_on_meta", build_restore),
                Target(
                    "vllm.model_executor.model_loader.utils",
                    "process_weights_after_loading",
                    build_process,
                    optional=True,
                ),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    report="docs/reports/vllm-reload-late-parameters.md",
    over=("vllm-mamba-conv-weights",),
    watches=(f"{META}:capture_layer_to_meta",),
)
