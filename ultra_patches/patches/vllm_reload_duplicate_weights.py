"""A weight that is sent twice counts twice, so that its layer finishes before another has come (no upstream report)."""

from __future__ import annotations

from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import load, parameter, poisoned, record, update
from ultra_patches.reload.upstream import LAYERWISE, META


def probe() -> Finding:
    """Reload a layer of two parameters, the first sent twice, and one whose halves are sent as q, q and k."""
    import torch

    def halves(param: torch.Tensor, loaded_weight: torch.Tensor, shard: int = 0) -> None:
        param.data.narrow(0, 2 * shard, 2).copy_(loaded_weight)

    def new() -> Any:
        layer = torch.nn.Module()
        layer.a, layer.b, layer.qk = parameter(4), parameter(4), parameter(4)
        layer.qk.weight_loader = halves
        record(layer)
        return layer

    two, ones = torch.full((4,), 2.0), torch.full((2,), 2.0)
    with poisoned(), torch.device("cpu"):
        whole, sharded = new(), new()
        qk: list[tuple[Any, ...]] = [("qk", ones, 0), ("qk", ones, 1)]
        for layer in (whole, sharded):
            load(layer, [("a", two), ("b", two), *qk])
        update(whole, [("a", two), ("a", two), *qk, ("b", two)])
        update(sharded, [("a", two), ("b", two), ("qk", ones, 0), ("qk", ones, 0), ("qk", ones, 1)])
    for sent, layer, name in (("a", whole, "b"), ("the first shard of qk", sharded, "qk")):
        last = layer.get_parameter(name)
        if not torch.equal(last, two):
            return Finding(Verdict.DEFECT, f"{sent} sent twice: {name} ends with {last[-1].item():.3g}, sent was 2.0")
    return Finding(Verdict.CLEAN, "all are 2.0 as sent, also where one was sent twice")


PATCH = Patch(
    id="vllm-reload-duplicate-weights",
    title="A weight that is sent twice in a session counts once",
    upstream="vllm",
    description=(
        "The layerwise reload finishes a layer when as many elements were loaded as it has. It adds up what each call "
        "loads and does not remember which, so a parameter or shard that is sent twice stands for another that has not "
        "come: the layer is finalized with uninitialised memory in place of that one, and what then comes is dropped. Tied "
        "embeddings, a retried bucket or two overlapping chunks are enough. No error, no warning. A weight that is sent again when "
        "its layer is complete is written over what a repacked layer computes with; with the patch it is dropped there."
    ),
    who="weight updates in which a name or a shard of it may come more than once",
    origin="ultra-patches",
    bug="not reported upstream",
    upstream_pr="https://github.com/vllm-project/vllm/pull/51378",
    pr_state="open: would replace counting by whole-model transactions",
    removal="upstream counts each element once",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "initialize_layerwise_reload", seam(session.begin, Rule.ONCE)),
                Target(LAYERWISE, "make_online_process_loader", seam(session.loader, Rule.ONCE)),
                Target(META, "get_numel_loaded", seam(session.count, Rule.ONCE)),
                Target(LAYERWISE, "_layerwise_process", seam(session.process, Rule.ONCE)),
                Target(LAYERWISE, "finalize_layerwise_reload", seam(session.finish, Rule.ONCE)),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=Rule.ONCE.over,
    withdraw=Rule.ONCE.withdraw,
    report="docs/reports/vllm-reload-duplicate-weights.md",
)
