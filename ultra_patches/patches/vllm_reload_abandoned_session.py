"""A session that failed or was never finished leaves layers without memory, and the next one skips them."""

from __future__ import annotations

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import begin, load, parameter, poisoned, record, update
from ultra_patches.reload.upstream import LAYERWISE

_WORKER = "vllm.v1.worker.gpu_worker"


def probe() -> Finding:
    """Start a session, load one of two weights, and start again as after a failure."""
    import torch

    with poisoned(), torch.device("cpu"):
        layer = torch.nn.Module()
        layer.a, layer.b = parameter(2), parameter(2)
        record(layer)
        both = [("a", torch.ones(2)), ("b", torch.ones(2))]
        load(layer, both)
        address = layer.a.data_ptr()
        begin(layer)
        load(layer, [("a", torch.full((2,), 2.0))])
        update(layer, [(name, torch.full((2,), 3.0)) for name in "ab"])
        values = {name: "without memory" if p.is_meta else p.tolist() for name, p in layer.named_parameters()}
        moved = layer.a.data_ptr() != address
    if values != {"a": [3.0, 3.0], "b": [3.0, 3.0]} or moved:
        said = ", ".join(f"{name} is {value}" for name, value in values.items())
        return Finding(Verdict.DEFECT, f"after a failed session the next one, of 3.0, gives: {said}")
    return Finding(Verdict.CLEAN, "the session after a failed one loads as if that had not been")


PATCH = Patch(
    id="vllm-reload-abandoned-session",
    title="A session that failed leaves the old weights, and the next one starts clean",
    upstream="vllm",
    description=(
        "While a session is open the layers that are not complete have parameters without memory. Nothing gives them back "
        "when a transport, a loader or a trainer fails, so the engine cannot generate; and the next session skips those "
        "layers and goes on with the counts and the kept weights of the failed one, which ends in garbage without an "
        "error. With the patch a failure gives the waiting layers their old tensors at their old addresses, a new session "
        "first ends one that was left open, and a warning says whether other layers had taken new weights already. With "
        "ULTRA_PATCHES_ATOMIC_RELOAD=1 none do before the session ends, which needs memory for all that was received."
    ),
    who="weight updates that can fail half-way and are retried: elastic trainers, timeouts, preemption",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/issues/57853",
    upstream_pr="https://github.com/vllm-project/vllm/pull/57854",
    pr_state="open: the engine survives a failed update",
    removal="upstream ends a session that failed",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "initialize_layerwise_reload", seam(session.begin, Rule.ABANDON)),
                Target(LAYERWISE, "_layerwise_process", seam(session.process, Rule.ABANDON)),
                Target(LAYERWISE, "finalize_layerwise_reload", seam(session.finish, Rule.ABANDON)),
                Target(_WORKER, "Worker.update_weights", seam(session.worker_call, Rule.ABANDON), optional=True),
                Target(_WORKER, "Worker.finish_weight_update", seam(session.worker_call, Rule.ABANDON), optional=True),
                Target(_WORKER, "Worker.reload_weights", seam(session.worker_call, Rule.ABANDON), optional=True),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=Rule.ABANDON.over,
    withdraw=Rule.ABANDON.withdraw,
)
