"""Set and take off the functions of one patch where others stand over it, so that the declared order is kept.

Where several patches replace one function, each calls the one below. One that comes late, or is taken back, goes in or out
from under those over it: they are taken off, newest first, and set again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from ultra_patches.core import apply
from ultra_patches.core.apply import Swap
from ultra_patches.core.evidence import sources_of
from ultra_patches.core.gate import State
from ultra_patches.core.ledger import Entry, entries
from ultra_patches.patch import Target


@contextlib.contextmanager
def rebinding() -> Iterator[list[Swap]]:
    """Collect what is set and taken off, and at the end rebind every stale reference to it in one scan."""
    swaps: list[Swap] = []
    try:
        yield swaps
    finally:
        rebind(swaps)


def rebind(swaps: list[Swap]) -> None:
    """Rebind every stale reference to what was replaced so far, and note how many each patch took over."""
    counts = apply.rebind(swaps)
    swaps.clear()
    for entry in entries.values() if counts else ():
        for key, applied in entry.applied.items():
            if id(applied.replacement) in counts:
                entry.applied[key] = replace(applied, rebound=counts[id(applied.replacement)])


def put(entry: Entry, module: ModuleType, target: Target, swaps: list[Swap], *, late: bool) -> bool:
    """Set one target under the patches that come after this one; False where it was set already.

    Raises apply.ForeignCodeError where someone else replaced the function.
    """
    before = entry.applied.get(target.key)
    if before is not None and apply.is_in_place(before):
        return False
    with _lifted(entry, target.key, swaps):
        source = sources_of(entry.patch).get(target.key)
        decorated = bool(source and source.decorated)
        now = apply.apply(entry.patch.id, module, target, swaps, decorated=decorated, late=late)
    if before is not None:
        entry.earlier.append(before)
    entry.applied[target.key] = now
    return True


def take_off(entry: Entry, swaps: list[Swap]) -> None:
    """Put the upstream's functions back, or those of the patches below.

    Raises RuntimeError, and changes nothing, where someone has replaced one of the functions since.
    """
    for replaced in filter(None, map(apply.replaced_since, entry.applied.values())):
        raise RuntimeError(f"{replaced}: revert that first, then this patch")
    for key in list(reversed(entry.applied)):
        with _lifted(entry, key, swaps):
            apply.revert(entry.applied.pop(key), swaps)
    swaps += [Swap(applied.replacement, applied.original) for applied in entry.earlier]
    entry.earlier.clear()
    if entry.patch.withdraw is not None:
        entry.patch.withdraw()


def give_up(entry: Entry, state: State, reason: str, swaps: list[Swap]) -> None:
    """Take back what is still ours; what someone else has set over it since is left alone."""
    for key in list(reversed(entry.applied)):
        with contextlib.suppress(RuntimeError), _lifted(entry, key, swaps):
            apply.revert(entry.applied[key], swaps)
        del entry.applied[key]
    entry.record(state, reason)  # before what may raise
    take_off(entry, swaps)


@contextlib.contextmanager
def _lifted(entry: Entry, key: str, swaps: list[Swap]) -> Iterator[None]:
    """Without the patches over this one's place, which are set again afterwards."""
    order = list(entries)
    after = order[order.index(entry.patch.id) + 1 :] if entry.patch.id in entries else []
    # A module that is executed again has none of ours: what is recorded then stands in the one before.
    over = [o for o in map(entries.__getitem__, after) if key in o.applied and apply.is_in_place(o.applied[key])]
    taken = [(other, other.applied.pop(key)) for other in reversed(over)]
    for _, applied in taken:
        apply.revert(applied, swaps)
    try:
        yield
    finally:
        for other, applied in reversed(taken):
            put(other, sys.modules[applied.target.module], applied.target, swaps, late=True)
