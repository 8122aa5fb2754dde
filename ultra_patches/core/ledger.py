"""What happened in this process, one entry a patch. Nothing here changes the program.

The overlay alone declares and forgets; all others look entries up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from ultra_patches.core.apply import Applied
from ultra_patches.core.gate import State
from ultra_patches.patch import Patch, Variant


@dataclass(frozen=True)
class PatchStatus:
    """One row of `status`. `rebound` counts stale references that a late patch replaced; `pid` is the asking process."""

    id: str
    title: str
    upstream: str
    version: str | None
    state: State
    reason: str
    targets: tuple[str, ...]
    rebound: int
    pid: int

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {**asdict(self), "state": self.state.value, "targets": list(self.targets)}


@dataclass
class Entry:
    """The one thing that changes while a process runs: what has become of a patch in it."""

    patch: Patch
    state: State | None = None
    reason: str = ""
    variant: Variant | None = None
    applied: dict[str, Applied] = field(default_factory=dict)
    late: bool = False
    #: What was set before its module was executed again: others may still hold it.
    earlier: list[Applied] = field(default_factory=list)

    def record(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason

    def status(self, version: str | None) -> PatchStatus:
        targets = tuple(t.key for t in self.variant.targets) if self.variant else ()
        state = self.state or State.ARMED
        rebound = sum(a.rebound for a in self.applied.values())
        patch = self.patch
        return PatchStatus(
            patch.id, patch.title, patch.upstream, version, state, self.reason, targets, rebound, os.getpid()
        )


_entries: dict[str, Entry] = {}
#: Every declared patch by id, each after those that it needs or is set over.
entries: Mapping[str, Entry] = MappingProxyType(_entries)


def declare(patches: Iterable[Patch]) -> None:
    """Add an entry for each patch that has none."""
    for patch in patches:
        _entries.setdefault(patch.id, Entry(patch))


def forget() -> None:
    """Remove every entry."""
    _entries.clear()
