"""On a CPU the MoE kernel computes with repacked weights, and a weight update leaves them as they come."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict

_MODULE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _setup_kernel(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        has_kernel = self.moe_kernel is not None
        original(self, layer, *args, **kwargs)
        # Elsewhere the experts may take hold of the layer's tensors here, which in a reload are not those that stay.
        if has_kernel and self.unquantized_backend.name == "CPU":
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return _setup_kernel


def probe() -> Finding:
    """Set up a kernel whose experts repack by doubling, and set it up again with new weights as an update does."""
    from unittest import mock

    import torch

    module: Any = importlib.import_module(_MODULE)
    method = module.UnquantizedFusedMoEMethod

    def repack(layer: Any) -> None:
        layer.w13_weight.data *= 2

    layer = torch.nn.Module()
    layer.moe_config = layer.shared_experts = None
    layer._expert_routing_tables = layer._maybe_init_expert_routing_tables = lambda: None
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=repack))
    self = SimpleNamespace(
        moe_kernel=None,
        moe=None,
        unquantized_backend=module.UnquantizedMoeBackend.CPU,
        experts_cls=object,
        get_fused_moe_quant_config=lambda _: object(),
    )
    self._init_moe_kernel = lambda layer: method._init_moe_kernel(self, layer)
    seen = []
    with (
        mock.patch.object(module, "make_unquantized_moe_kernel", return_value=kernel),
        mock.patch.object(
            module,
            "convert_to_unquantized_kernel_format",
            lambda *_, w13_weight, w2_weight, **__: (w13_weight, w2_weight),
        ),
    ):
        for _ in range(2):
            for name in ("w13_weight", "w2_weight"):
                setattr(layer, name, torch.nn.Parameter(torch.ones(1), requires_grad=False))
            method._setup_kernel(self, layer, layer.w13_weight.data, layer.w2_weight.data)
            seen.append(layer.w13_weight.item())
    if seen[0] == seen[1]:
        return Finding(Verdict.CLEAN, "the first load and an update leave the weights alike")
    return Finding(
        Verdict.DEFECT,
        f"a weight of 1 is {seen[0]:.0f} to the kernel after the first load, {seen[1]:.0f} after an update",
    )


PATCH = Patch(
    id="vllm-cpu-moe-prepack",
    title="A weight update of MoE layers on a CPU is repacked as the first load was",
    upstream="vllm",
    description=(
        "The CPU experts compute with weights in a layout of their own, made when the kernel is made. A weight update keeps "
        "the kernel and copies the new weights as they come over the repacked ones, so that every expert of every MoE layer "
        "is scrambled. No error; GPUs are not concerned. It is what a test of weight transfer without a GPU meets first."
    ),
    who="weight updates of MoE models in CPU builds",
    origin="ultra-patches",
    bug="not reported upstream",
    upstream_pr="none",
    pr_state="not proposed",
    removal="upstream repacks whenever it sets up the kernel",
    last_checked="2026-11-30",
    report="docs/reports/vllm-cpu-moe-prepack.md",
    variants=(Variant("all", (Target(_MODULE, "UnquantizedFusedMoEMethod._setup_kernel", build),)),),
    probe=probe,
    probe_after=(_MODULE,),
)
