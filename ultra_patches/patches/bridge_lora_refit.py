"""An export that does not merge its LoRA adapters gives names that vLLM does not have, and DoRA is merged as if it were LoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ultra_patches import flags
from ultra_patches.errors import UltraPatchesError
from ultra_patches.lora.toys import probe_refit
from ultra_patches.patch import Patch, Target, Variant
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

_CONVERSION = "megatron.bridge.models.conversion"
#: `1`: whoever receives the weights knows their `.base_layer` names.
ALLOW = flags.ALLOW_UNMERGED
#: What is part of the name of a Megatron parameter that an adapter wraps, or of the adapter's own.
_MARKS = (".to_wrap.", ".adapter.", ".lora_")
#: Names that an error lists.
_SHOWN = 5


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(original)
    can_merge = "quantization_checker" not in signature.parameters

    def stream_weights_megatron_to_hf(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A plain function, so that the error comes from the call and not from the first weight.
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        models, tasks = call.arguments["megatron_model"], call.arguments["conversion_tasks"]
        models = models if isinstance(models, list) else [models]
        if not call.arguments["merge_adapter_weights"]:
            if not flags.is_on(ALLOW):
                _refuse_unmerged(self, models, tasks, can_merge)
        else:
            _refuse_dora(models)
        return original(self, *args, **kwargs)

    return stream_weights_megatron_to_hf


def _refuse_unmerged(bridge: Any, models: list[Any], tasks: Any, can_merge: bool) -> None:
    """Raise UltraPatchesError where an export has weights under an adapter, the same on every pipeline stage."""
    if tasks is None:
        from megatron.core.utils import unwrap_model

        names = bridge._megatron_global_param_names_all_pp_ranks(unwrap_model(models))
    else:
        names = [task.global_param_name for task in tasks if task is not None]
    wrapped = [name for name in names if any(mark in name for mark in _MARKS)]
    if not wrapped:
        return
    exported = list(dict.fromkeys(_exported(bridge.mapping_registry(), wrapped)))
    merge = (
        "For a full-weight refit export with merge_adapter_weights=True"
        if can_merge
        else "Megatron-Bridge merges no quantised export: export with export_hf_weights(merge_adapter_weights=True)"
    )
    raise UltraPatchesError(
        f"the export would leave out the adapters of {len(exported)} weights: {_listed(exported)}. A plain vLLM model has no "
        f"such names, so it would go on with the weights it has. {merge}; to serve the adapters themselves use "
        f"export_adapter_weights or save_hf_adapter; for a receiver that knows these names set {ALLOW}=1"
    )


def _exported(registry: Any, wrapped: list[str]) -> Iterator[str]:
    """The Hugging Face names, as the export marks them, of Megatron parameters under an adapter."""
    for name in wrapped:
        mapping = registry.megatron_to_hf_lookup(name.replace(".to_wrap.", "."))
        if mapping is None:
            yield name
            continue
        found = mapping.hf_param
        for one in [found] if isinstance(found, str) else found.values():
            stem, dot, last = one.rpartition(".")
            # Experts that share one tensor are exported under its plain name, which is worse.
            yield one if getattr(mapping, "is_grouped_export", False) else f"{stem}.base_layer{dot}{last}"


def _refuse_dora(models: list[Any]) -> None:
    """Raise UltraPatchesError where a model has magnitudes, which Megatron-Bridge's merge does not know."""
    names = [name for model in models for name, _ in model.named_parameters() if name.endswith(".weight_magnitude")]
    if names:
        raise UltraPatchesError(
            f"{len(names)} modules have DoRA adapters, and Megatron-Bridge merges those as LoRA, without their magnitudes: "
            f"{_listed(names)}. The exported weights would be none that were trained: train with LoRA instead"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


PATCH = Patch(
    id="bridge-lora-refit",
    title="An export with unmerged adapters is refused",
    upstream="megatron-bridge",
    description=(
        "`export_hf_weights(merge_adapter_weights=False)` of a model with LoRA gives names with `.base_layer`, and "
        "experts that share one tensor keep their plain name; vLLM has no such names or takes the base weights for the trained "
        "ones. With merging on, DoRA is merged as LoRA. Both end in an error that lists the names before anything is "
        "exported. ULTRA_PATCHES_ALLOW_UNMERGED=1 lets the unmerged export pass."
    ),
    who="full-weight refit of a model with adapters",
    origin="ultra-patches",
    bug="https://github.com/NVIDIA-NeMo/RL/issues/2754",
    upstream_pr="none",
    pr_state="unfixed in 0.6.2",
    removal="every supported release refuses unmerged weights for a receiver that does not ask for them, and merges DoRA",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(f"{_CONVERSION}.model_bridge", "MegatronModelBridge.stream_weights_megatron_to_hf", build),
                Target(
                    f"{_CONVERSION}.quant_bridge",
                    "MegatronQuantizationBridge.stream_weights_megatron_to_hf_quant",
                    build,
                    optional=True,
                ),
            ),
        ),
    ),
    probe=probe_refit,
    prepare=stand_in_for_gpu_packages,
    over=("bridge-lora-merge",),
)
