"""Set and take off the functions of one patch where others stand over it, so that the declared order is kept.

Where several patches replace one function, each calls the one below. One that comes late, or is taken back, goes in or out
from under those over it: they are taken off, newest first, and set again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

from ultra_patches.core import apply
from ultra_patches.core.evidence import sources_of
from ultra_patches.core.gate import State
from ultra_patches.core.ledger import Entry, entries
from ultra_patches.patch import Target


def put(entry: Entry, module: ModuleType, target: Target, *, late: bool) -> bool:
    """Set one target under the patches that come after this one; False where it was set already.

    Raises apply.ForeignCodeError where someone else replaced the function.
    """
    before = entry.applied.get(target.key)
    with _lifted(entry, target.key):
        source = sources_of(entry.patch).get(target.key)
        now = apply.apply(entry.patch.id, module, target, decorated=bool(source and source.decorated), late=late)
    if before is not None and now.replacement is before.replacement:
        return False
    if before is not None:
        entry.earlier.append(before)
    entry.applied[target.key] = now
    return True


def take_off(entry: Entry) -> None:
    """Put the upstream's functions back, or those of the patches below.

    Raises RuntimeError, and changes nothing, where someone has replaced one of the functions since.
    """
    for replaced in filter(None, map(apply.replaced_since, entry.applied.values())):
        raise RuntimeError(f"{replaced}: revert that first, then this patch")
    for key in list(reversed(entry.applied)):
        with _lifted(entry, key):
            apply.revert(entry.applied.pop(key))
    for applied in entry.earlier:
        apply.rebind(applied.replacement, applied.original)
    entry.earlier.clear()
    if entry.patch.withdraw is not None:
        entry.patch.withdraw()


def give_up(entry: Entry, state: State, reason: str) -> None:
    """Take back what is still ours; what someone else has set over it since is left alone."""
    for key in list(reversed(entry.applied)):
        with contextlib.suppress(RuntimeError), _lifted(entry, key):
            apply.revert(entry.applied[key])
        del entry.applied[key]
    take_off(entry)
    entry.record(state, reason)


@contextlib.contextmanager
def _lifted(entry: Entry, key: str) -> Iterator[None]:
    """Without the patches over this one's place, which are set again afterwards."""
    order = list(entries)
    after = order[order.index(entry.patch.id) + 1 :] if entry.patch.id in entries else []
    # A module that is executed again has none of ours: what is recorded then stands in the one before.
    over = [o for o in map(entries.__getitem__, after) if key in o.applied and apply.is_in_place(o.applied[key])]
    taken = [(other, other.applied.pop(key)) for other in reversed(over)]
    for _, applied in taken:
        apply.revert(applied)
    try:
        yield
    finally:
        for other, applied in reversed(taken):
            put(other, sys.modules[applied.target.module], applied.target, late=True)
