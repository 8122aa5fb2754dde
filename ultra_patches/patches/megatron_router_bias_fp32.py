"""Float16Module rounds the router's expert bias to bf16, and nothing can tell afterwards."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.bias.hold import hold, put_back
from ultra_patches.bias.probe import judge, toy_config, toy_router
from ultra_patches.patch import Finding, Patch, Target, Variant

_MODULE = "megatron.core.transformer.module"


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    # Calls the original: later releases keep further tensors in fp32 there, and that must stay.
    def __init__(self: Any, config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        held = hold([module])
        original(self, config, module, *args, **kwargs)
        put_back(held)

    return __init__


def probe() -> Finding:
    """Wrap a module with a router bias of 512 trained values, as every Megatron trainer in bf16 does."""
    from megatron.core.transformer.module import Float16Module

    model, bias = toy_router()
    Float16Module(toy_config(), model)
    return judge(model, bias)


PATCH = Patch(
    id="megatron-router-bias-fp32",
    title="Float16Module leaves the router's expert bias in fp32",
    upstream="megatron-core",
    description=(
        "`Float16Module` converts every buffer of the model, also `expert_bias` of the MoE routers. Trained biases lie at 25 "
        "to 57 and differ by 7e-4, so bf16 leaves one distinct value of 512 and about 14 % of tokens change their experts. "
        "`_maintain_float32_expert_bias` then relabels the rounded values fp32, so a check of the dtype passes. Loading a "
        "checkpoint after the wrap is safe; loading before it, as Bridge's pre-wrap hooks do, is not."
    ),
    who="training in bf16 or fp16 of MoE models with a router bias whose weights are loaded before the wrap",
    origin="ultra-patches",
    bug="https://github.com/radixark/miles/pull/811",
    upstream_pr="https://github.com/NVIDIA/Megatron-LM/pull/5929",
    pr_state="main honours mark_keep_in_fp32, but nothing marks expert_bias; in no release",
    removal="every supported release keeps expert_bias across Float16Module",
    last_checked="2026-11-29",
    variants=(Variant("all", (Target(_MODULE, "Float16Module.__init__", build),)),),
    probe=probe,
)
