"""Arm the patches in this process, set each when its upstream module has been executed, and tell what became of it."""

from __future__ import annotations

import functools
import sys
import warnings
from types import ModuleType

from ultra_patches import apply, discover, facts, hooks, settings
from ultra_patches.errors import UltraPatchesError, UltraPatchesWarning
from ultra_patches.facts import Upstream
from ultra_patches.fingerprint import Source
from ultra_patches.gate import BAD, Action, Decision, Evidence, State, decide
from ultra_patches.ledger import Entry, PatchStatus, entries
from ultra_patches.patch import Patch, Target, Verdict

_complained: set[str] = set()


def arm() -> None:
    """Read the declarations and watch the modules that hold their targets. Imports no upstream.

    Raises UltraPatchesError in strict mode only: for a setting that means nothing, a declaration that cannot be read,
    and a patch that is needed and cannot be set.
    """
    patches, complaints = discover.patches()
    chosen = settings.read(patches)
    for text in (*complaints, *chosen.complaints):
        _complain(text, chosen)
    # A patch that another one requires is set before it.
    for patch in sorted(patches.values(), key=lambda p: len(p.requires)):
        entries.setdefault(patch.id, Entry(patch))
    if chosen.mode == "off":
        return
    for module in dict.fromkeys(m for patch in patches.values() for m in patch.modules):
        hooks.watch(module, _executed)
    if chosen.mode == "strict":
        for row in status():
            if row.state in BAD:
                _complain(f"{row.id} is {row.state.value}: {row.reason}", chosen)


def disarm() -> None:
    """Revert what was set and forget the hooks, newest first. Raises RuntimeError where a target was replaced since."""
    for entry in reversed(entries.values()):
        _undo(entry)
    hooks.unwatch_all()
    entries.clear()
    _complained.clear()


def status() -> list[PatchStatus]:
    """One row a patch, for this process, read back from the live functions."""
    hooks.settle()
    chosen = settings.read(entries)
    return [_status(entry, chosen) for _, entry in sorted(entries.items())]


def require(patch_id: str) -> None:
    """Raise UltraPatchesError with the reason unless the patch is in force in this process or is not needed."""
    _known(patch_id)
    row = next(row for row in status() if row.id == patch_id)
    if row.state in (State.APPLIED, State.APPLIED_LATE, State.NOT_NEEDED):
        return
    hint = f"; import {row.targets[0].partition(':')[0]} first" if row.state is State.ARMED and row.targets else ""
    raise UltraPatchesError(f"{patch_id} is required but {row.state.value}: {row.reason}{hint}")


def revert(patch_id: str) -> None:
    """Put the upstream's functions back, also for the patches that need this one, and keep them so.

    Raises UltraPatchesError for an unknown id, and where someone has replaced our function since.
    """
    entry = _known(patch_id)
    for other in entries.values():
        if patch_id in other.patch.requires and other.applied:
            revert(other.patch.id)
    try:
        _undo(entry)
    except RuntimeError as error:
        raise UltraPatchesError(f"{patch_id} cannot be reverted: {error}") from error
    entry.record(State.REVERTED, "revert() was called in this process")


def _known(patch_id: str) -> Entry:
    if patch_id not in entries:
        raise UltraPatchesError(f"no patch is called {patch_id!r} ({settings.nearest(patch_id, entries)})")
    return entries[patch_id]


def _undo(entry: Entry) -> None:
    for key in list(reversed(entry.applied)):
        apply.revert(entry.applied[key])
        del entry.applied[key]


def _executed(module: ModuleType, late: bool) -> None:
    chosen = settings.read(entries)
    concerned = [e for e in entries.values() if module.__name__ in e.patch.modules and e.state is not State.REVERTED]
    decisions = [(entry, decision_for(entry.patch, chosen)) for entry in concerned]
    # Probes last: they must not run the functions of another patch that is half set.
    for entry, decision in sorted(decisions, key=lambda pair: pair[1].action is Action.PROBE):
        try:
            _advance(entry, decision, module, late)
        except apply.ForeignCodeError as error:
            _undo(entry)
            entry.record(State.CONFLICT, f"{error}{_behaviour(entry.patch)}: remove it, or keep it and disable ours")
        except Exception as error:  # whatever went wrong must not end the user's import
            _undo(entry)
            entry.record(State.FAILED, f"{type(error).__name__}: {error}: report it with `ultra-patches status --json`")
    for entry in concerned:
        blocked = _blocked(entry.patch, chosen) if entry.applied else None
        if blocked is not None:
            _undo(entry)
            entry.record(*blocked)
        if entry.state in BAD:
            _complain(f"{entry.patch.id} is {entry.state.value}: {entry.reason}", chosen)


def _behaviour(patch: Patch) -> str:
    """What the probe says of a function that someone else has set, where it can run here."""
    if not patch.probe_after or not all(name in sys.modules for name in patch.modules):
        return f" (`ultra-patches verify {patch.id}` says how it behaves)"
    try:
        finding = patch.probe()
    except Exception as error:  # foreign code may do anything
        return f" (the probe ends with {type(error).__name__} on it)"
    said = {Verdict.CLEAN: "behaves well under", Verdict.DEFECT: "has the defect by"}.get(finding.verdict, "escapes")
    return f" ({said} the probe: {finding.detail})"


def _advance(entry: Entry, decision: Decision, module: ModuleType, late: bool) -> None:
    entry.variant = decision.variant
    if decision.variant is None:
        entry.record(decision.state, decision.reason)
        return
    targets = decision.variant.targets
    # What is set already stays decided: a probe would now run our own functions.
    if decision.action is Action.PROBE and not entry.applied:
        if any(name not in sys.modules for name in (*entry.patch.probe_after, *(t.module for t in targets))):
            return
        finding = entry.patch.probe()
        if finding.verdict is not Verdict.DEFECT:
            clean = finding.verdict is Verdict.CLEAN
            entry.record(State.NOT_NEEDED if clean else State.DRIFTED, f"the probe says: {finding.detail}")
            return
        for target in targets:
            _set(entry, sys.modules[target.module], target, late=True)
    else:
        for target in targets:
            if target.module == module.__name__:
                _set(entry, module, target, late=late)
        if late:
            entry.late = True
    if len(entry.applied) == len(targets):
        entry.record(State.APPLIED_LATE if entry.late else State.APPLIED, decision.reason)


def _set(entry: Entry, module: ModuleType, target: Target, *, late: bool) -> None:
    source = sources_of(entry.patch).get(target.key)
    entry.applied[target.key] = apply.apply(
        entry.patch.id, module, target, decorated=bool(source and source.decorated), late=late
    )


def decision_for(patch: Patch, chosen: settings.Settings) -> Decision:
    """Gather the evidence on one patch and ask the gate."""
    from ultra_patches import lock, verdicts

    if chosen.excludes(patch.id):
        return decide(patch, Evidence(None, {}), lock.Lock({}, {}, {}), chosen)
    upstream = _upstream(patch.upstream)
    sources = sources_of(patch)
    remembered = verdicts.recall(patch, sources) if upstream else None
    blocked = _blocked(patch, chosen)
    return decide(patch, Evidence(upstream, sources, remembered, blocked), lock.load(), chosen)


def _blocked(patch: Patch, chosen: settings.Settings) -> tuple[State, str] | None:
    for other in patch.requires:
        entry = entries.get(other)
        if entry is None:
            return State.DRIFTED, f"needs {other}, which is not declared"
        state = entry.state or decision_for(entry.patch, chosen).state
        if state in BAD or state in (State.DISABLED, State.REVERTED):
            return state, f"needs {other}, which is {state.value}"
    return None


def _upstream(name: str) -> Upstream | None:
    package = name.split("-", maxsplit=1)[0]
    return _located(name, package in sys.modules, tuple(sys.path))


@functools.lru_cache(maxsize=32)
def _located(name: str, loaded: bool, path: tuple[str, ...]) -> Upstream | None:
    # What is loaded and the path are in the key, because they decide what would be imported.
    return facts.locate(name)


def sources_of(patch: Patch) -> dict[str, Source]:
    """The fingerprint of each target and watched function of a patch that is found on disk."""
    upstream = _upstream(patch.upstream)
    if upstream is None:
        return {}
    keys = [t.key for v in patch.variants for t in v.targets] + list(patch.watches)
    return {key: source for key in keys if (source := facts.read_source(upstream, key)) is not None}


def _status(entry: Entry, chosen: settings.Settings) -> PatchStatus:
    upstream = _upstream(entry.patch.upstream)
    shown = Entry(entry.patch, entry.state, entry.reason, entry.variant, dict(entry.applied), entry.late)
    if entry.state is None:
        decision = decision_for(entry.patch, chosen)
        shown.variant = decision.variant
        shown.record(decision.state, decision.reason)
        if entry.applied and decision.variant is not None:
            waiting = [t.module for t in decision.variant.targets if t.key not in entry.applied]
            shown.reason = (
                f"{len(entry.applied)} of {len(decision.variant.targets)} targets set, waiting for {waiting[0]}"
            )
    elif entry.state in (State.APPLIED, State.APPLIED_LATE):
        for applied in entry.applied.values():
            replaced = _replaced_since(applied)
            if replaced:
                shown.record(State.CONFLICT, f"set by us, then replaced: {replaced}")
    return shown.status(upstream.version if upstream else None)


def _replaced_since(applied: apply.Applied) -> str | None:
    module = sys.modules.get(applied.target.module)
    if module is None:
        return None
    live = apply.resolve(module, applied.target.name).function
    return None if live is applied.replacement else f"{applied.target.key} is {apply.describe(live)}"


def _complain(text: str, chosen: settings.Settings) -> None:
    if chosen.mode == "strict":
        raise UltraPatchesError(text)
    if text in _complained:
        return
    _complained.add(text)
    try:
        warnings.warn(text, UltraPatchesWarning, stacklevel=2)
    except UltraPatchesWarning:
        # Under -W error a warning would end the import of the upstream, which only strict mode may do.
        print(f"ultra-patches: {text}", file=sys.stderr)
