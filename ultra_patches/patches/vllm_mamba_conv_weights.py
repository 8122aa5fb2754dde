"""A buffer that is a view of a parameter is reloaded as if it were one, over that parameter (vllm-project/vllm#42481)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload.toys import LAYERWISE, load, parameter, poisoned, record, session

_META = "vllm.model_executor.model_loader.reload.meta"


def _aliases(layer: Any) -> dict[str, Any]:
    """Non-persistent buffers whose memory is a parameter's, of the layer itself or of one inside it."""
    if not layer._non_persistent_buffers_set:
        return {}
    storages = {p.untyped_storage().data_ptr() for p in layer.parameters() if not p.is_meta}
    return {
        name: buffer
        for name, buffer in layer._buffers.items()
        if buffer is not None
        and name in layer._non_persistent_buffers_set
        and not buffer.is_meta
        and buffer.untyped_storage().data_ptr() in storages
    }


def build_restore(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def restore_layer_on_meta(layer: Any, info: Any) -> None:
        if type(layer).__name__ in module.SKIP_MODULES:
            return
        skipped = module.SKIP_TENSORS
        aliases = _aliases(layer)
        parameters, buffers = info.restore_metadata
        loadable = [n for n in (*parameters, *buffers) if n not in skipped and n not in aliases]
        info.ultra_non_persistent = set(layer._non_persistent_buffers_set)
        # A layer that has nothing but views keeps them: upstream puts tensors back only where some were to be loaded.
        info.ultra_aliases = aliases if loadable else {}
        for name in info.ultra_aliases:
            # Out of the copy loop, which would write uninitialised memory through the view into the parameter.
            info.kernel_tensors[1].pop(name, None)
        for name in module.get_layer_tensors(layer):
            if name not in skipped and (loadable or name not in aliases):
                delattr(layer, name)
        for name, meta in parameters.items():
            if name not in skipped:
                layer.register_parameter(name, module.restore_layer_refs(meta, layer))
        for name, buffer in buffers.items():
            if name not in skipped and name not in aliases:
                persistent = name not in info.ultra_non_persistent
                layer.register_buffer(name, module.restore_layer_refs(buffer, layer), persistent=persistent)

    return restore_layer_on_meta


def build_place(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _place_kernel_tensors(layer: Any, info: Any) -> None:
        non_persistent = getattr(info, "ultra_non_persistent", layer._non_persistent_buffers_set)
        parameters, buffers = info.kernel_tensors
        for name in module.get_layer_tensors(layer):
            delattr(layer, name)
        for name, kernel in parameters.items():
            layer.register_parameter(name, kernel)
        for name, buffer in {**buffers, **getattr(info, "ultra_aliases", {})}.items():
            layer.register_buffer(name, buffer, persistent=name not in non_persistent)
        info.ultra_aliases = {}

    return _place_kernel_tensors


def probe() -> Finding:
    """Reload a layer built as MambaMixer2 is: the weight of a child, and a non-persistent view of it in the parent."""
    import torch

    with poisoned(), torch.device("cpu"):
        mixer = torch.nn.Module()
        mixer.conv1d = torch.nn.Module()
        mixer.conv1d.weight = parameter(6, 1, 4)
        mixer.D = parameter(3)
        mixer.register_buffer("conv_weights", mixer.conv1d.weight.view(6, 4), persistent=False)
        record(mixer)
        sent = [("D", torch.full((3,), 2.0)), ("conv1d.weight", torch.full((6, 1, 4), 2.0))]
        load(mixer, sent)
        session(mixer, sent)
        weight, view = mixer.conv1d.weight, mixer.get_buffer("conv_weights")
    if not torch.equal(weight, torch.full((6, 1, 4), 2.0)):
        return Finding(Verdict.DEFECT, f"conv1d.weight is {weight.flatten()[0].item():.3g}, sent was 2.0")
    if view.data_ptr() != weight.data_ptr():
        return Finding(Verdict.DEFECT, "conv_weights is no longer a view of conv1d.weight")
    if "conv_weights" in mixer.state_dict():
        return Finding(Verdict.DEFECT, "values right, but conv_weights has become part of the state dict")
    return Finding(Verdict.CLEAN, "conv1d.weight is 2.0 as sent, conv_weights its view")


PATCH = Patch(
    id="vllm-mamba-conv-weights",
    title="A view of a parameter stays a view during a reload",
    upstream="vllm",
    description=(
        "`MambaMixer2.conv_weights` is a non-persistent buffer that shares the memory of `conv1d.weight`. Up to 0.21 the "
        "reload treats it as a tensor of its own: no checkpoint carries it, so uninitialised memory is copied into it, and "
        "through it over `conv1d.weight`. From 0.22 the values are right, but the buffer comes back as a persistent one, "
        "so `state_dict()` and whatever saves from it carry a name that no checkpoint has."
    ),
    who="weight updates of models with Mamba2 layers (NemotronH, Bamba, FalconH1, Zamba2, …)",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/pull/42481",
    upstream_pr="https://github.com/vllm-project/vllm/pull/42481",
    pr_state="merged, values right since 0.22.0; persistence since 0.26.0 (#44371)",
    removal="vllm < 0.26 is no longer supported",
    last_checked="2026-11-29",
    variants=(
        Variant(
            "all",
            (
                Target(_META, "restore_layer_on_meta", build_restore),
                Target(LAYERWISE, "_place_kernel_tensors", build_place),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    requires=("vllm-reload-numel-guard",),
    watches=(f"{_META}:capture_layer_to_meta",),
)
