"""A loader that copies twice makes its layer finish early, and what is loaded last is lost (vllm-project/vllm#44814)."""

from __future__ import annotations

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import load, parameter, poisoned, record, update
from ultra_patches.reload.upstream import LAYERWISE, META


def probe() -> Finding:
    """Reload a layer of three parameters, the first with a loader that transforms in place as Mamba's `A` does."""
    import torch

    def composed(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)
        param.data.copy_(-torch.exp(param.float()))

    with poisoned(), torch.device("cpu"):
        layer = torch.nn.Module()
        for name in ("A", "D", "dt_bias"):
            setattr(layer, name, parameter(4))
        layer.A.weight_loader = composed
        record(layer)
        sent = [(name, torch.full((4,), 2.0)) for name in ("A", "D", "dt_bias")]
        load(layer, sent)
        update(layer, sent)
        last = layer.get_parameter("dt_bias")
    if torch.equal(last, torch.full((4,), 2.0)):
        return Finding(Verdict.CLEAN, "dt_bias is 2.0 as sent")
    return Finding(Verdict.DEFECT, f"dt_bias is {last[0].item():.3g}, sent was 2.0")


PATCH = Patch(
    id="vllm-reload-numel-guard",
    title="A loader that copies twice no longer ends its layer's reload early",
    upstream="vllm",
    description=(
        "`get_numel_loaded` counts every element that a weight loader copies. `composed_weight_loader` copies a parameter "
        "and then transforms it in place, so it counts twice; the layer reaches its total before its last parameter has "
        "come and is finalized with uninitialised memory in it. In NemotronH that is one of A, D and dt_bias of every "
        "Mamba2 layer, and text stays fluent. Up to 0.21 another defect hides this one: see vllm-mamba-conv-weights."
    ),
    who="weight updates of models with Mamba2 layers, and of any layer with a composed weight loader",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/pull/44814",
    upstream_pr="https://github.com/vllm-project/vllm/pull/44814",
    pr_state="merged, in 0.24.0",
    removal="vllm < 0.24 is no longer supported",
    last_checked="2026-11-29",
    variants=(
        Variant(
            "all",
            (Target(META, "get_numel_loaded", seam(session.count, Rule.CAP)),),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
)
