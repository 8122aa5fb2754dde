"""The plan: what each GPU holds in each phase of a step, whether it fits, and the least that would make it fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from examples.planning import megatron, sync, vllm
from examples.planning.checks import Check, check
from examples.planning.layout import Layout
from examples.planning.megatron import Stage
from examples.planning.model import Model

GIB = 1 << 30


@dataclass(frozen=True)
class Phase:
    """Bytes on one GPU while trainer or rollout do something."""

    name: Literal["train", "sync", "generate"]
    gpu: Literal["trainer", "rollout", "both"]
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """Phases are of the worst pipeline stage. They and the stages are empty where the layout does not divide."""

    parameters: int
    checks: tuple[Check, ...]
    verdict: Literal["fits", "does not fit", "does not divide"]
    reason: str
    stages: tuple[Stage, ...] = ()
    engine_bytes: tuple[int, ...] = ()
    phases: tuple[Phase, ...] = ()
    #: Bytes of gradients and optimizer that are in host memory for a part of a step or all of it, a GPU.
    host: int = 0


def plan(model: Model, layout: Layout) -> Plan:
    """Check the layout, add up what its GPUs hold, and judge it."""
    checks = tuple(check(model, layout))
    if broken := [one for one in checks if not one.holds]:
        reason = "; ".join(f"{one.rule}: {one.found}: {one.advice}" for one in broken)
        return Plan(model.parameters, checks, "does not divide", reason)
    stages = tuple(megatron.stages(model, layout.trainer))
    engine = tuple(vllm.rank_bytes(model, layout.rollout))
    found = _phases(model, layout, stages, max(engine))
    worst = max(found, key=lambda phase: phase.total)
    left = layout.memory - worst.total
    said = f"{worst.name} takes {worst.total / GIB:.1f} of {layout.memory / GIB:.1f} GiB on each {_whose(worst)}GPU"
    if left >= layout.reserve:
        verdict: Literal["fits", "does not fit"] = "fits"
        reason = f"{said}, {left / GIB:.1f} GiB are left for activations, KV cache and CUDA"
    else:
        verdict = "does not fit"
        reason = f"{said}, and {layout.reserve / GIB:.1f} GiB are to be left; {_remedy(model, layout)}"
    return Plan(model.parameters, checks, verdict, reason, stages, engine, found, _host(layout, stages))


def _whose(phase: Phase) -> str:
    return "" if phase.gpu == "both" else f"{phase.gpu} "


def _worst(layout: Layout, stages: tuple[Stage, ...]) -> dict[str, int]:
    return max((megatron.bytes_of(stage, layout.trainer) for stage in stages), key=lambda parts: sum(parts.values()))


def _host(layout: Layout, stages: tuple[Stage, ...]) -> int:
    resident = _worst(replace(layout, trainer=replace(layout.trainer, optimizer_on_host=False)), stages)
    if layout.trainer.offload_for_rollout:
        return resident["gradients"] + resident["optimizer"]
    return resident["optimizer"] if layout.trainer.optimizer_on_host else 0


def _phases(model: Model, layout: Layout, stages: tuple[Stage, ...], engine: int) -> tuple[Phase, ...]:
    trainer = _worst(layout, stages)
    kept = {"weights": trainer["weights"]} if layout.trainer.offload_for_rollout else trainer
    sending = {"exported": sync.exported(model, layout), "packs": sync.packs_sent(model, layout)}
    rollout = {"vLLM weights": engine}
    received = sync.packs_received(model, layout)
    taking = {**rollout, "vLLM reload": sync.reloaded(model) * (1 + layout.rollout.tp) // layout.rollout.tp}
    if layout.colocated:
        awake = {} if layout.rollout.sleep else rollout
        return (
            Phase("train", "both", {**trainer, **awake}),
            Phase("sync", "both", {**kept, **sending, **taking}),
            Phase("generate", "both", {**kept, **rollout}),
        )
    return (
        Phase("train", "trainer", trainer),
        Phase("sync", "trainer", {**trainer, **sending}),
        Phase("sync", "rollout", {**taking, "packs": received}),
        Phase("generate", "rollout", rollout),
    )


Remedy = tuple[str, Callable[[Layout], Layout]]


def _remedies(layout: Layout) -> list[Remedy]:
    """What can be changed without other sizes, cheapest first."""
    trainer: list[tuple[str, dict[str, object]]] = [
        ("bf16 moments (--moment-bytes 2)", {"moment_bytes": 2}),
        ("bf16 gradients (--grad-bytes 2)", {"grad_bytes": 2}),
        ("the optimizer in host memory (--optimizer-on-host)", {"optimizer_on_host": True}),
    ]
    found: list[Remedy] = []
    if layout.colocated:
        found.append(("vLLM asleep in training (--vllm-sleep)", _sleeping))
        trainer.append(
            (
                "gradients and optimizer in host memory for the rollout (--offload-for-rollout)",
                {"offload_for_rollout": True},
            )
        )
    found += [(text, _with(changes)) for text, changes in trainer]
    return [(text, apply) for text, apply in found if apply(layout) != layout]


def _sleeping(layout: Layout) -> Layout:
    return replace(layout, rollout=replace(layout.rollout, sleep=True))


def _with(changes: dict[str, object]) -> Callable[[Layout], Layout]:
    return lambda layout: replace(layout, trainer=replace(layout.trainer, **changes))  # type: ignore[arg-type]


def _remedy(model: Model, layout: Layout) -> str:
    """The fewest changes that make it fit."""
    remedies = _remedies(layout)
    stages, engine = tuple(megatron.stages(model, layout.trainer)), max(vllm.rank_bytes(model, layout.rollout))
    for count in range(1, len(remedies) + 1):
        for chosen in combinations(remedies, count):
            changed = layout
            for _, apply in chosen:
                changed = apply(changed)
            if max(one.total for one in _phases(model, changed, stages, engine)) + layout.reserve <= layout.memory:
                return "it fits with " + " and ".join(text for text, _ in chosen)
    return "no change of precision or of what is in host memory makes it fit: take more GPUs, or larger TP, PP or EP"
