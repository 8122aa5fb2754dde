"""A parameter that was registered after the model was made has no place in a reload: AttributeError."""

from __future__ import annotations

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import load, parameter, poisoned, record, update
from ultra_patches.reload.upstream import LAYERWISE, META


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
            update(layer, sent)
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
                Target(META, "restore_layer_on_meta", seam(session.restore, Rule.LATE)),
                Target(
                    "vllm.model_executor.model_loader.utils",
                    "process_weights_after_loading",
                    seam(session.record, Rule.LATE),
                    optional=True,
                ),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=Rule.LATE.over,
    report="docs/reports/vllm-reload-late-parameters.md",
    watches=(f"{META}:capture_layer_to_meta",),
)
