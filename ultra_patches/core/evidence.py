"""Gather what the gate looks at: where the upstream is, its functions on disk, kept verdicts, and patches it waits for."""

from __future__ import annotations

import functools
import sys

from ultra_patches.core import facts, settings
from ultra_patches.core.facts import Upstream
from ultra_patches.core.fingerprint import Source
from ultra_patches.core.gate import BAD, Decision, Evidence, State, decide
from ultra_patches.core.ledger import entries
from ultra_patches.patch import Patch


def decision_for(patch: Patch, chosen: settings.Settings, above: tuple[str, ...] = ()) -> Decision:
    """Gather the evidence on one patch and ask the gate. `above` are the patches that wait for this one."""
    from ultra_patches.core import lock, verdicts

    if chosen.excludes(patch.id):
        return decide(patch, Evidence(None, {}), lock.Lock({}, {}, {}), chosen)
    upstream = upstream_of(patch.upstream)
    sources = sources_of(patch)
    remembered = verdicts.recall(patch, sources) if upstream else None
    blocked = blocked_by(patch, chosen, (*above, patch.id))
    return decide(patch, Evidence(upstream, sources, remembered, blocked), lock.load(), chosen)


def blocked_by(patch: Patch, chosen: settings.Settings, above: tuple[str, ...]) -> tuple[State, str] | None:
    """The state and reason of a patch that needs one which is not in force; None where nothing is in its way."""
    for other in patch.requires:
        entry = entries.get(other)
        if entry is None:
            return State.DRIFTED, f"needs {other}, which is not declared"
        if other in above:
            return State.DRIFTED, f"needs {other}, which needs it in turn"
        state = entry.state or decision_for(entry.patch, chosen, above).state
        if state is State.DISABLED and _needless(entry.patch, above):
            continue
        if state in BAD or state in (State.DISABLED, State.REVERTED):
            return state, f"needs {other}, which is {state.value}"
    return None


def _needless(patch: Patch, above: tuple[str, ...]) -> bool:
    """Whether a patch that the user has turned off would not be set here anyway."""
    return decision_for(patch, settings.Settings(), above).state is State.NOT_NEEDED


def upstream_of(name: str) -> Upstream | None:
    """Where an upstream would be imported from, looked up once for each state of the path."""
    package = name.split("-", maxsplit=1)[0]
    return _located(name, package in sys.modules, tuple(sys.path))


@functools.lru_cache(maxsize=32)
def _located(name: str, loaded: bool, path: tuple[str, ...]) -> Upstream | None:
    # What is loaded and the path are in the key, because they decide what would be imported.
    return facts.locate(name)


def sources_of(patch: Patch) -> dict[str, Source]:
    """The fingerprint of each target and watched function of a patch that is found on disk."""
    upstream = upstream_of(patch.upstream)
    if upstream is None:
        return {}
    return {key: source for key in patch.keys if (source := facts.read_source(upstream, key)) is not None}
