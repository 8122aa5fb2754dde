"""Biases are written into the model in the middle of a session, and one of them keeps a loader that then loads nothing."""

from __future__ import annotations

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import begin, finish, load, parameter, poisoned, record, update
from ultra_patches.reload.upstream import LAYERWISE, META


def probe() -> Finding:
    """Look at two biases in the middle of a session, and load plainly after a session without them."""
    import torch

    two, five = torch.full((2,), 2.0), torch.full((2,), 5.0)
    with poisoned(), torch.device("cpu"):
        model = torch.nn.Module()
        model.layer, model.gate, model.other = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
        model.layer.weight, model.layer.bias, model.other.w = parameter(2), parameter(2), parameter(2)
        model.gate.weight, model.gate.e_score_correction_bias = parameter(2), parameter(2)
        record(model)
        live = {"bias": model.layer.bias, "e_score_correction_bias": model.gate.e_score_correction_bias}
        biases = [("layer.bias", two), ("gate.e_score_correction_bias", two)]
        begin(model)
        load(model, biases)
        early = [name for name, bias in live.items() if bias.tolist() != [0.0, 0.0]]
        load(model, [("layer.weight", two), ("gate.weight", two), ("other.w", two)])
        finish(model)
        lost = [name for name, bias in live.items() if bias.tolist() != [2.0, 2.0]]
        update(model, [("other.w", two)])
        load(model, [("layer.weight", five), ("layer.bias", five), ("gate.e_score_correction_bias", five)])
        stuck = [name for name, bias in live.items() if bias.tolist() != [5.0, 5.0]]
    said = (
        (early, "written into the model in mid-session"),
        (lost, "not what was sent"),
        (stuck, "not loaded by a plain load after a session without it"),
    )
    wrong = [f"{', '.join(names)}: {what}" for names, what in said if names]
    return Finding(Verdict.DEFECT, "; ".join(wrong)) if wrong else Finding(Verdict.CLEAN, "biases change at the end")


PATCH = Patch(
    id="vllm-reload-live-write",
    title="Biases are not written into the model before the session ends",
    upstream="vllm",
    description=(
        "The layerwise reload leaves some parameters where they are: `e_score_correction_bias` since 0.20 and `bias` since "
        "0.27. What a session sends for them is written into the running model at once, so that a session which fails, or "
        "generation in its middle, mixes new biases with old weights. `bias` also keeps the session's loader when its layer "
        "was not part of the session, and a plain `load_weights` afterwards drops it without a word."
    ),
    who="models with a router bias or with linear biases, wherever a session can fail or generation goes on meanwhile",
    origin="ultra-patches",
    bug="not reported upstream; brought by #38746 and #49586",
    upstream_pr="none",
    pr_state="not proposed",
    removal="upstream keeps back the tensors of SKIP_TENSORS as well",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "initialize_layerwise_reload", seam(session.begin, Rule.STAGE)),
                Target(META, "restore_layer_on_meta", seam(session.restore, Rule.STAGE)),
                Target(LAYERWISE, "_layerwise_process", seam(session.process, Rule.STAGE)),
                Target(LAYERWISE, "finalize_layerwise_reload", seam(session.finish, Rule.STAGE)),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=Rule.STAGE.over,
    withdraw=Rule.STAGE.withdraw,
    report="docs/reports/vllm-reload-live-write.md",
    watches=(f"{LAYERWISE}:make_online_process_loader",),
)
