"""The model builder of megatron.training wraps, and then relabels the rounded router bias fp32."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.bias.hold import hold, put_back
from ultra_patches.bias.probe import judge, toy_config, toy_router
from ultra_patches.patch import Finding, Patch, Target, Variant

_MODULE = "megatron.training.models.dist_utils"


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _wrap_with_mp_wrapper(model_list: Any, *args: Any, **kwargs: Any) -> Any:
        held = hold(model_list)
        wrapped = original(model_list, *args, **kwargs)
        put_back(held)
        return wrapped

    return _wrap_with_mp_wrapper


def probe() -> Finding:
    """Wrap with the builder's default and with a wrapper of the user's own, which no patch of Float16Module reaches."""
    import importlib

    builder: Any = importlib.import_module(_MODULE)
    model, bias = toy_router()
    builder._wrap_with_mp_wrapper([model], toy_config(), lambda _, inner: inner.bfloat16())
    return judge(model, bias)


PATCH = Patch(
    id="megatron-router-bias-builder",
    title="The model builder leaves the router's expert bias in fp32",
    upstream="megatron-core",
    description=(
        "`_wrap_with_mp_wrapper` wraps the model first and calls `_maintain_float32_expert_bias` after, when the values are "
        "rounded already. With Float16Module the patch megatron-router-bias-fp32 suffices; this one covers every other "
        "wrapper that is passed in. Bridge builds through the same function from 0.5 on."
    ),
    who="models built by megatron.training or Bridge's builder path with a mixed-precision wrapper of their own",
    origin="ultra-patches",
    bug="https://github.com/radixark/miles/pull/811",
    upstream_pr="none",
    pr_state="unfixed in 0.19.2",
    removal="every supported release holds expert_bias across the wrap",
    last_checked="2026-11-29",
    variants=(Variant("all", (Target(_MODULE, "_wrap_with_mp_wrapper", build),)),),
    probe=probe,
)
