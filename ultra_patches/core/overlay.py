"""Arm the patches in this process, set each when its upstream module has been executed, and tell what became of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from ultra_patches.core import apply, discover, facts, guard, hooks, ledger, settings, stack, verdicts
from ultra_patches.core.apply import Swap
from ultra_patches.core.evidence import decisions, sources_of, upstream_of
from ultra_patches.core.gate import BAD, Action, Decision, State
from ultra_patches.core.ledger import Entry, PatchStatus, entries
from ultra_patches.core.order import circles, clashes, in_order
from ultra_patches.errors import UltraPatchesError, one_line
from ultra_patches.patch import Finding, Patch, Target, Verdict
from ultra_patches.stand_ins import ambient
from ultra_patches.untrusted import without_credentials

if TYPE_CHECKING:
    from ultra_patches.core import probing

#: What probes saw in this process's time, by what it holds for.
_seen: dict[str, probing.Probed] = {}
#: What each listener gave: a function to call at each change, and one to call at the end.
_listeners: list[tuple[Callable[[], str | None], Callable[[], None]]] = []


def listen(changed: Callable[[], str | None], stop: Callable[[], None]) -> None:
    """Call `changed` whenever a patch may have changed its state or an upstream was imported, and `stop` at `disarm`.

    Takes effect with the next `arm`. `changed` gives one line to complain about, or None.
    """
    _listeners.append((changed, stop))


def arm() -> None:
    """Read the declarations and watch the modules that hold their targets. Imports no upstream.

    Raises UltraPatchesError in strict mode only: for a setting that means nothing, a declaration that cannot be read,
    and a patch that is needed and cannot be set.
    """
    patches, complaints = discover.patches()
    chosen = settings.read(patches)
    if settings.own_command():
        # The command says what is wrong itself, and must not end in strict mode before it says why a patch is not set.
        complaints = []
        chosen = replace(chosen, mode="off" if chosen.mode == "off" else "warn", complaints=())
    for text in (*complaints, *chosen.complaints):
        _complain(text, chosen)
    distrusted = verdicts.distrusted() if chosen.mode != "off" else None
    if distrusted is not None:
        guard.say(distrusted)
    ledger.declare(in_order(patches).values())
    if _listeners:
        for package, _, _ in facts.UPSTREAMS.values():
            hooks.watch(package, lambda *_: _tell())
    try:
        _arm(patches, chosen)
    finally:
        _tell()


def _arm(patches: Mapping[str, Patch], chosen: settings.Settings) -> None:
    if chosen.mode == "off":
        for entry in entries.values():
            entry.record(State.DISABLED, "ULTRA_PATCHES=off when ultra_patches was imported")
        return
    if hooks.in_subinterpreter():
        for entry in entries.values():
            entry.record(State.DISABLED, "ultra_patches was imported in a sub-interpreter")
        _complain(
            "ultra_patches sets nothing in a sub-interpreter, into which torch cannot be imported either: use a process of its own",
            chosen,
        )
        return
    for text in _disorder(tuple(patches.values()), chosen):
        _complain(text, chosen)
    watched = dict.fromkeys(module for patch in patches.values() for module in patch.modules)
    _set([module for name in watched if (module := hooks.watch(name, _executed)) is not None], True, chosen)
    if chosen.mode == "strict":
        for row in status():
            if row.state in BAD:
                _complain(f"{row.id} is {row.state.value}: {row.reason}", chosen)


def _disorder(patches: tuple[Patch, ...], chosen: settings.Settings) -> list[str]:
    """What is wrong with the declared order of patches that the user wants."""
    told = list(circles(patches).items())
    told += [(frozenset(clash.ids), clash.text) for clash in clashes(patches) if clash.left_out]
    return [text for ids, text in told if not any(map(chosen.excludes, ids))]


def _tell() -> None:
    """Tell the listeners that something changed. Never raises, also in strict mode: they correct nothing."""
    for changed, _ in _listeners:
        with guard.door(getattr(changed, "__qualname__", "a listener"), strict=False):
            said = changed()
            if said:
                guard.say(said)


def disarm() -> None:
    """Revert what was set, newest first, and forget the hooks and the listeners.

    Raises RuntimeError where a target was replaced since.
    """
    with stack.rebinding() as swaps:
        for entry in reversed(list(entries.values())):
            stack.take_off(entry, swaps)
    while _listeners:
        _listeners.pop()[1]()
    hooks.unwatch_all()
    ledger.forget()
    _seen.clear()
    guard.forget()


def status() -> list[PatchStatus]:
    """One row a patch, for this process, read back from the live functions."""
    hooks.settle()
    waiting = [patch_id for patch_id, entry in entries.items() if entry.state is None]
    try:
        decided = decisions(settings.read(entries), waiting)
    except Exception as error:
        why = f"what is installed cannot be looked at ({one_line(error)}): report it"
        decided = dict.fromkeys(waiting, Decision(Action.NOTHING, State.FAILED, why))
    return [_row(entry, decided.get(patch_id)) for patch_id, entry in sorted(entries.items())]


def _row(entry: Entry, decision: Decision | None) -> PatchStatus:
    try:
        return _status(entry, decision)
    except Exception as error:
        return replace(entry.status(None), state=State.FAILED, reason=f"its state cannot be read ({one_line(error)})")


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
    with stack.rebinding() as swaps:
        _revert(_known(patch_id), swaps)
    _tell()


def _revert(entry: Entry, swaps: list[Swap]) -> None:
    for other in entries.values():
        if entry.patch.id in other.patch.requires and other.applied:
            _revert(other, swaps)
    try:
        stack.take_off(entry, swaps)
    except RuntimeError as error:
        raise UltraPatchesError(f"{entry.patch.id} cannot be reverted: {error}") from error
    entry.record(State.REVERTED, "revert() was called in this process")


def _known(patch_id: str) -> Entry:
    if patch_id not in entries:
        raise UltraPatchesError(f"no patch is called {patch_id!r} ({settings.nearest(patch_id, entries)})")
    return entries[patch_id]


def _executed(module: ModuleType, late: bool) -> None:
    chosen = settings.read(entries)
    try:
        _set([module], late, chosen)
    finally:
        _tell()


def _set(modules: Iterable[ModuleType], late: bool, chosen: settings.Settings) -> None:
    """Set what waits for these modules, with one scan for all references that others hold to what is replaced."""
    with stack.rebinding() as swaps:
        for module in modules:
            _set_what_waits(module, late, chosen, swaps)


def _set_what_waits(module: ModuleType, late: bool, chosen: settings.Settings, swaps: list[Swap]) -> None:
    concerned = [e for e in entries.values() if module.__name__ in e.patch.modules and e.state is not State.REVERTED]
    decided = decisions(chosen, [entry.patch.id for entry in concerned])
    # Probes last: they must not run the functions of another patch that is half set.
    for entry in sorted(concerned, key=lambda entry: decided[entry.patch.id].action is Action.PROBE):
        with guard.door(f"taking {entry.patch.id} back"):
            _try(entry, decided[entry.patch.id], module, late, swaps)
    # An entry comes after those that it requires, so that one pass is enough.
    for entry in entries.values():
        blocked = None
        if entry.applied and entry.patch.requires:
            blocked = decisions(chosen, [entry.patch.id])[entry.patch.id].blocked
        if blocked is not None:
            stack.give_up(entry, *blocked, swaps)
        elif entry not in concerned:
            continue
        if entry.state in BAD:
            _complain(f"{entry.patch.id} is {entry.state.value}: {entry.reason}", chosen)


def _try(entry: Entry, decision: Decision, module: ModuleType, late: bool, swaps: list[Swap]) -> None:
    """Set what can be set of one patch; what goes wrong becomes its state."""
    try:
        _advance(entry, decision, module, late, swaps)
    except apply.ForeignCodeError as error:
        stack.rebind(swaps)
        text = f"{error}{_behaviour(entry.patch)}: remove it, or keep it and disable ours"
        stack.give_up(entry, State.CONFLICT, text, swaps)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever went wrong must not end the user's import
        text = f"{one_line(error)}: report it with `ultra-patches status --json`"
        stack.give_up(entry, State.FAILED, text, swaps)


def _behaviour(patch: Patch) -> str:
    """What the probe says of a function that someone else has set, where it can run here.

    Only this process has that function. No other thread may see what the probe replaces for its time.
    """
    here = patch.probe_after and all(name in sys.modules for name in patch.modules)
    if not here or threading.active_count() > 1:
        return f" (`ultra-patches verify {patch.id}` says how it behaves)"
    try:
        with ambient.fixed():
            finding = patch.probe()
    except Exception as error:  # foreign code may do anything
        return f" (the probe ends with {type(error).__name__} on it)"
    said = {Verdict.CLEAN: "behaves well under", Verdict.DEFECT: "has the defect by"}.get(finding.verdict, "escapes")
    return f" ({said} the probe: {finding.detail})"


def _advance(entry: Entry, decision: Decision, module: ModuleType, late: bool, swaps: list[Swap]) -> None:
    entry.variant = decision.variant
    if decision.variant is None:
        entry.record(decision.state, decision.reason)
        return
    targets, required = decision.variant.targets, decision.variant.required
    # After a failure all targets are set or none, also those in modules that were executed before.
    together = entry.state in BAD
    # Where some are set already a probe would run our own functions.
    if decision.action is Action.PROBE and not entry.applied:
        if not _shows_the_defect(entry, module, required):
            return
        together = True
    ready = all(hooks.ready(target.module, module.__name__) for target in required)
    for target in targets:
        here = hooks.ready(target.module, module.__name__) if target.optional else ready
        if (here if together else target.module == module.__name__) and _exists(target, entry):
            changed = stack.put(entry, sys.modules[target.module], target, swaps, late=late or together)
            entry.late |= late and changed
    if all(target.key in entry.applied for target in required):
        entry.record(State.APPLIED_LATE if entry.late else State.APPLIED, decision.reason)


def _exists(target: Target, entry: Entry) -> bool:
    return not target.optional or target.key in sources_of(entry.patch)


def _shows_the_defect(entry: Entry, module: ModuleType, targets: tuple[Target, ...]) -> bool:
    """Probe the installed code, and record what it says where that is not the defect."""
    # What is still being executed has not all of its functions.
    if not all(hooks.ready(n, module.__name__) for n in (*entry.patch.probe_after, *(t.module for t in targets))):
        return False
    finding = _probed(entry)
    if finding.verdict is Verdict.DEFECT:
        return True
    if finding.verdict is Verdict.CLEAN:
        entry.record(State.NOT_NEEDED, f"the probe says: {finding.detail}")
    else:
        why = f"the probe says: {finding.detail}: run `ultra-patches verify {entry.patch.id}`"
        entry.record(State.DRIFTED, why)
    return False


def _probed(entry: Entry) -> Finding:
    """What the probe sees in a process of its own, on the files that were imported here.

    All that wait for a probe and can share that process are asked at once, as importing an upstream takes seconds.
    """
    from ultra_patches.core import probing  # arming does without

    key = _key(entry)
    if key not in _seen:
        alike = (entry.patch.upstream, entry.patch.prepare)
        chosen = settings.read(entries)
        waiting = [e for e in entries.values() if e.state is None and (e.patch.upstream, e.patch.prepare) == alike]
        decided = decisions(chosen, [other.patch.id for other in waiting])
        asked = [other for other in waiting if decided[other.patch.id].action is Action.PROBE or other is entry]
        seen = probing.ask([other.patch for other in asked])
        _seen.update((_key(other), seen[other.patch.id]) for other in asked)
    seen_here = _seen[key]
    for name, file in seen_here.files.items():
        here = getattr(sys.modules.get(name), "__file__", None)
        if here and file and os.path.realpath(here) != os.path.realpath(file):
            return Finding(Verdict.INCONCLUSIVE, f"it ran {file}, but {here} is imported here")
    return seen_here.finding


def _key(entry: Entry) -> str:
    return verdicts.name_of(entry.patch, sources_of(entry.patch))


def _status(entry: Entry, decision: Decision | None) -> PatchStatus:
    upstream = upstream_of(entry.patch.upstream)
    shown = Entry(entry.patch, entry.state, entry.reason, entry.variant, dict(entry.applied), entry.late)
    if entry.state is None and decision is not None:
        shown.variant = decision.variant
        shown.record(decision.state, decision.reason)
        if entry.applied and decision.variant is not None:
            required = decision.variant.required
            waiting = [t.module for t in required if t.key not in entry.applied]
            shown.reason = f"{len(required) - len(waiting)} of {len(required)} targets set, waiting for {waiting[0]}"
    elif entry.state in (State.APPLIED, State.APPLIED_LATE):
        for applied in entry.applied.values():
            replaced = apply.replaced_since(applied)
            if replaced:
                shown.record(State.CONFLICT, f"set by us, then replaced: {replaced}")
    return shown.status(upstream.version if upstream else None)


def _complain(text: str, chosen: settings.Settings) -> None:
    text = without_credentials(text)
    if chosen.mode == "strict":
        raise UltraPatchesError(text)
    guard.say(text)
