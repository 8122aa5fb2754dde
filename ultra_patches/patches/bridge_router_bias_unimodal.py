"""Bridge's own copy of the model builder's wrap, in 0.4."""

from __future__ import annotations

from typing import Any

from ultra_patches.bias.probe import judge, toy_config, toy_router
from ultra_patches.patch import Finding, Patch, Target, Variant
from ultra_patches.patches.megatron_router_bias_builder import build
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

_MODULE = "megatron.bridge.models.common.unimodal"


def probe() -> Finding:
    """Wrap with a wrapper of the user's own, which no patch of Float16Module reaches."""
    import importlib

    builder: Any = importlib.import_module(_MODULE)
    model, bias = toy_router()
    builder._wrap_with_mp_wrapper([model], toy_config(), lambda _, inner: inner.bfloat16())
    return judge(model, bias)


PATCH = Patch(
    id="bridge-router-bias-unimodal",
    title="Bridge's builder path leaves the router's expert bias in fp32",
    upstream="megatron-bridge",
    description=(
        "`models/common/unimodal.py` (used by `training/setup.py` and `model_load_save.py`) wraps the model and relabels the "
        "rounded bias afterwards. From 0.5 it takes core's function, which megatron-router-bias-builder corrects."
    ),
    who="models built by Bridge 0.4's builder path",
    origin="ultra-patches",
    bug="https://github.com/radixark/miles/pull/811",
    upstream_pr="none",
    pr_state="moved to megatron-core in 0.5.0, unfixed there",
    removal="megatron-bridge < 0.5 is no longer supported",
    last_checked="2026-11-29",
    variants=(Variant("all", (Target(_MODULE, "_wrap_with_mp_wrapper", build),)),),
    probe=probe,
    prepare=stand_in_for_gpu_packages,
)
