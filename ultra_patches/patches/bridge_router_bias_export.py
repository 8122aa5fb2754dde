"""Exporting with `weight_dtype=torch.bfloat16` rounds the router's expert bias with everything else."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.bias.probe import compare, trained_bias
from ultra_patches.bias.rule import sync_dtype
from ultra_patches.patch import Finding, Patch, Target, Variant
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

_MODULE = "megatron.bridge.models.conversion.model_bridge"


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _cast_export_weight_dtype(weights: Any, weight_dtype: Any) -> Any:
        if weight_dtype is None:
            return weights
        return {name: weight.to(sync_dtype(name, weight, weight_dtype)) for name, weight in weights.items()}

    return _cast_export_weight_dtype


def probe() -> Finding:
    """Hand the exporter a router bias and ask for bf16."""
    import importlib

    import torch

    bridge: Any = importlib.import_module(_MODULE)
    bias = trained_bias()
    name = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    cast = bridge.MegatronModelBridge._cast_export_weight_dtype({name: bias}, torch.bfloat16)
    return compare(cast[name], bias)


PATCH = Patch(
    id="bridge-router-bias-export",
    title="An export in bf16 leaves the router's expert bias in fp32",
    upstream="megatron-bridge",
    description=(
        "`export_hf_weights(weight_dtype=torch.bfloat16)` casts every floating-point tensor. vLLM holds the bias in fp32, so "
        "the rounded values are loaded without a word."
    ),
    who="weight sync through AutoBridge with `weight_dtype` set",
    origin="ultra-patches",
    bug="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4301",
    upstream_pr="none",
    pr_state="unfixed in 0.6.2",
    removal="every supported release exempts the router bias from weight_dtype",
    last_checked="2026-11-29",
    variants=(Variant("all", (Target(_MODULE, "MegatronModelBridge._cast_export_weight_dtype", build),)),),
    probe=probe,
    prepare=stand_in_for_gpu_packages,
)
