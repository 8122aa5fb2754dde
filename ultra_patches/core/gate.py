"""Decide whether a patch is to be set. Frozen data in, a decision out; imports no upstream and touches no file.

A version only helps to explain. What decides is the source of the functions that are installed: the same lines as in a
release that was measured get that release's verdict, other lines are probed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from ultra_patches.core.facts import Upstream
from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.core.lock import AFFECTED, Lock
from ultra_patches.core.order import Clash, in_order
from ultra_patches.core.settings import Settings
from ultra_patches.patch import Patch, Variant, Verdict


class State(str, Enum):
    """What a user reads. Only `applied` and `applied-late` say that the correction is in force."""

    NOT_INSTALLED = "not-installed"
    NOT_NEEDED = "not-needed"
    DISABLED = "disabled"
    ARMED = "armed"
    APPLIED = "applied"
    APPLIED_LATE = "applied-late"
    DRIFTED = "drifted"
    CONFLICT = "conflict"
    FAILED = "failed"
    REVERTED = "reverted"


#: States after which generation may be garbage: a needed correction is not in force.
BAD = frozenset({State.DRIFTED, State.CONFLICT, State.FAILED})


class Action(str, Enum):
    """What is to be done when the target's module has been executed."""

    NOTHING = "nothing"
    APPLY = "apply"
    PROBE = "probe"


@dataclass(frozen=True)
class Decision:
    """`state` is what to report until the targets are imported; `variant` is what to set then."""

    action: Action
    state: State
    reason: str
    variant: Variant | None = None
    #: State and reason of a patch in `requires` that is not in force; None where each of them is or is not needed.
    blocked: tuple[State, str] | None = None


@dataclass(frozen=True)
class Evidence:
    """Everything the gate looks at for one patch. `sources` holds each target and watched function found on disk."""

    upstream: Upstream | None
    sources: Mapping[str, Fingerprint]
    #: The verdict that `ultra-patches verify` kept for exactly these sources, if it did.
    remembered: Verdict | None = None
    #: Why none of this could be gathered.
    failure: str | None = None


def digests(patch: Patch, variant: Variant | None, sources: Mapping[str, Fingerprint]) -> dict[str, str]:
    """The digest of each function the verdict depends on; the empty string where it does not exist.

    Without a variant, all targets of all variants: none of them fits, and that is what identifies the release. What an
    optional target does is no part of the verdict.
    """
    variants = patch.variants if variant is None else (variant,)
    keys = dict.fromkeys([t.key for v in variants for t in v.required] + list(patch.watches))
    return {key: sources[key].digest if key in sources else "" for key in keys}


def choose(patch: Patch, sources: Mapping[str, Fingerprint]) -> Variant | None:
    """The first variant of which every required target exists."""
    return next((v for v in patch.variants if all(t.key in sources for t in v.required)), None)


def decide_all(
    patches: Mapping[str, Patch],
    evidence: Mapping[str, Evidence],
    lock: Lock,
    settings: Settings,
    known: Mapping[str, State] = MappingProxyType({}),
    clashes: Iterable[Clash] = (),
) -> dict[str, Decision]:
    """Decide on each patch after those that it needs, in one pass.

    A patch that would be set is not where one that it needs is not in force: it would uncover another defect. `known` holds
    the states that patches have reached in this process; they count for those that need them in place of the decision.
    Needs that are not among `patches`, and needs in a circle, make a patch drifted. Of two that clash, and would both be
    set, those that are `left_out` are in conflict. Raises KeyError where a patch has no evidence.
    """
    alone = {name: decide(patch, evidence[name], lock, settings) for name, patch in patches.items()}
    alone |= {name: decision for clash in clashes for name, decision in _apart(clash, alone, known).items()}
    # What a patch counts as for those that need it. One that waits for others counts when they are decided.
    states = {name: decision.state for name, decision in alone.items() if decision.action is Action.NOTHING}
    states.update((name, state) for name, state in known.items() if name in patches)
    for name in {need for patch in patches.values() for need in patch.requires if states.get(need) is State.DISABLED}:
        if decide(patches[name], evidence[name], lock, Settings()).state is State.NOT_NEEDED:
            states[name] = State.NOT_NEEDED  # disabled by the user, but it would not be set here anyway
    decisions: dict[str, Decision] = {}
    # A patch that is not set anyway closes no circle.
    to_set = {name: patch for name, patch in patches.items() if alone[name].action is not Action.NOTHING}
    for name, patch in in_order(to_set, lambda patch: patch.requires).items():
        blocked = _blocked(patch, patches, states)
        decisions[name] = alone[name] if blocked is None else Decision(Action.NOTHING, *blocked, blocked=blocked)
        states.setdefault(name, decisions[name].state)
    for name in patches.keys() - to_set.keys():
        decisions[name] = replace(alone[name], blocked=_blocked(patches[name], patches, states))
    return {name: decisions[name] for name in patches}


def _apart(clash: Clash, alone: Mapping[str, Decision], known: Mapping[str, State]) -> dict[str, Decision]:
    """Leave out what would be set without an order over or under another; what is in force already stays."""
    if any(name not in alone or known.get(name) is State.REVERTED for name in clash.ids):
        return {}
    variants = [alone[name].variant for name in clash.ids]
    targets = [{target.key for target in variant.targets} if variant else set() for variant in variants]
    if not targets[0] & targets[1] & set(clash.keys):
        return {}
    in_force = {name for name in clash.ids if known.get(name) in (State.APPLIED, State.APPLIED_LATE)}
    out = [name for name in clash.left_out if name not in in_force]
    return dict.fromkeys(out, Decision(Action.NOTHING, State.CONFLICT, clash.text))


def _blocked(patch: Patch, declared: Collection[str], states: Mapping[str, State]) -> tuple[State, str] | None:
    for need in patch.requires:
        if need not in declared:
            return State.DRIFTED, f"needs {need}, which is not declared"
        state = states.get(need)
        if state is None:
            return State.DRIFTED, f"needs {need}, which needs it in turn"
        if state in BAD or state in (State.DISABLED, State.REVERTED):
            return state, f"needs {need}, which is {state.value}"
    return None


def decide(patch: Patch, evidence: Evidence, lock: Lock, settings: Settings) -> Decision:
    """Weigh the user's wish, what is installed, what was measured, and what a probe said, in this order.

    Other patches do not count here: `decide_all` asks for those that a patch needs.
    """
    excluded = settings.excludes(patch.id)
    if excluded:
        return Decision(Action.NOTHING, State.DISABLED, excluded)
    if evidence.failure is not None:
        return Decision(Action.NOTHING, State.FAILED, evidence.failure)
    upstream = evidence.upstream
    if upstream is None:
        return Decision(Action.NOTHING, State.NOT_INSTALLED, f"{patch.upstream} is not installed")
    variant = choose(patch, evidence.sources)
    releases = lock.releases_with(upstream.name, digests(patch, variant, evidence.sources))
    if variant is None and not _absent_there_too(upstream, releases, lock):
        releases = ()
    verdicts = {lock.verdicts.get(patch.id, {}).get(release) for release in releases}
    if releases and verdicts == {AFFECTED} and variant is not None:
        return Decision(Action.APPLY, State.ARMED, _same_as(releases), variant)
    if releases and AFFECTED not in verdicts and None not in verdicts:
        why = _why_not_needed(patch, releases, lock) if variant else "this release has none of the functions"
        return Decision(Action.NOTHING, State.NOT_NEEDED, why)
    return _unknown(patch, evidence, lock, upstream, variant)


def _absent_there_too(upstream: Upstream, releases: tuple[str, ...], lock: Lock) -> bool:
    """Whether the upstream lacks a function because it is like the releases that have none, by its version.

    A missing function alone identifies no release: later than those it may have been moved or renamed, and a source build
    may call itself 0.1.dev493.
    """
    from packaging.version import InvalidVersion, Version

    if not releases:
        return False
    newest = max(Version(r) for d in lock.functions[upstream.name].values() for rs in d.values() for r in rs)
    without = [Version(release) for release in releases]
    try:
        return max(without) == newest or min(without) <= Version(upstream.version or "") <= max(without)
    except InvalidVersion:
        return False


def _unknown(patch: Patch, evidence: Evidence, lock: Lock, upstream: Upstream, variant: Variant | None) -> Decision:
    here = f"{upstream.name} {upstream.version or 'of unknown version'}"
    if variant is None:
        gone = ", ".join(t.key for v in patch.variants for t in v.required if t.key not in evidence.sources)
        return Decision(
            Action.NOTHING,
            State.DRIFTED,
            f"{here} has no {gone} (renamed or moved?): run `ultra-patches explain {patch.id}` and report it",
        )
    if evidence.remembered is Verdict.CLEAN:
        return Decision(Action.NOTHING, State.NOT_NEEDED, f"verify did not see the defect on this source of {here}")
    changed = [
        f"{t.key}{evidence.sources[t.key].signature}"
        for t in variant.targets
        if t.key in evidence.sources
        and (known := lock.signatures_of(upstream.name, t.key))
        and evidence.sources[t.key].signature not in known
    ]
    if changed:
        return Decision(
            Action.NOTHING,
            State.DRIFTED,
            f"{here} is called in another way ({', '.join(changed)}): upgrade ultra-patches or report it",
        )
    if evidence.remembered is Verdict.DEFECT:
        return Decision(Action.APPLY, State.ARMED, f"verify saw the defect on this source of {here}", variant)
    if patch.probe_after:
        return Decision(
            Action.PROBE, State.ARMED, f"source of {here} is in no known release: probed on import", variant
        )
    return Decision(
        Action.NOTHING,
        State.DRIFTED,
        f"source of {here} is in no known release: run `ultra-patches verify {patch.id}` once, its verdict is kept",
    )


def _same_as(releases: tuple[str, ...]) -> str:
    if len(releases) == 1:
        return f"same source as in {releases[0]}, which is affected"
    return f"same source as in {releases[0]} to {releases[-1]}, which are affected"


def _why_not_needed(patch: Patch, releases: tuple[str, ...], lock: Lock) -> str:
    from packaging.version import Version

    fixed = patch.fixed_in or lock.fixed_in(patch.id)
    # Locked releases are real ones, so they always parse.
    if fixed is not None and (fixed in releases or Version(releases[0]) >= Version(fixed)):
        return f"fixed upstream since {fixed}"
    return f"never affected: same source as in {releases[0]}"
