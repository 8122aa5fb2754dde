"""Gather what the gate looks at: where the upstream is, its functions on disk, and the verdicts that `verify` kept."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable

from ultra_patches.core import facts
from ultra_patches.core.facts import Upstream
from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.core.gate import Decision, Evidence, decide_all
from ultra_patches.core.ledger import entries
from ultra_patches.core.order import clashes
from ultra_patches.core.settings import Settings
from ultra_patches.errors import one_line
from ultra_patches.patch import Patch


def decisions(chosen: Settings, ids: Iterable[str] | None = None) -> dict[str, Decision]:
    """Gather the evidence once and decide on every declared patch; with `ids` only on these and those that they need.

    Raises KeyError for an id that is not declared.
    """
    from ultra_patches.core import lock

    clashing = [clash for clash in clashes(tuple(entry.patch for entry in entries.values())) if clash.left_out]
    wanted = list(entries if ids is None else ids)
    for one in wanted:
        others = [*entries[one].patch.requires, *(other for c in clashing if one in c.ids for other in c.ids)]
        wanted += [other for other in dict.fromkeys(others) if other in entries and other not in wanted]
    patches = {one: entries[one].patch for one in wanted}
    # Nothing is read for a patch that the user excludes, except where another one needs it.
    needed = {need for patch in patches.values() for need in patch.requires}
    read = {one for one in patches if one in needed or not chosen.excludes(one)}
    evidence = {one: _evidence(patch) if one in read else Evidence(None, {}) for one, patch in patches.items()}
    known = {one: state for one in patches if (state := entries[one].state) is not None}
    return decide_all(patches, evidence, lock.load() if read else lock.Lock({}, {}, {}), chosen, known, clashing)


def _evidence(patch: Patch) -> Evidence:
    from ultra_patches.core import verdicts

    try:
        upstream = upstream_of(patch.upstream)
        sources = sources_of(patch)
        return Evidence(upstream, sources, verdicts.recall(patch, sources) if upstream else None)
    except Exception as error:  # noqa: BLE001 # what cannot be looked at for one patch must not end the others
        return Evidence(None, {}, failure=f"{patch.upstream} cannot be looked at ({one_line(error)}): report it")


def upstream_of(name: str) -> Upstream | None:
    """Where an upstream would be imported from, looked up once for each state of the path."""
    package = name.split("-", maxsplit=1)[0]
    return _located(name, package in sys.modules, tuple(facts.search_path()))


@functools.lru_cache(maxsize=32)
def _located(name: str, loaded: bool, path: tuple[str, ...]) -> Upstream | None:
    # What is loaded and the path are in the key, because they decide what would be imported.
    return facts.locate(name)


def sources_of(patch: Patch) -> dict[str, Fingerprint]:
    """The fingerprint of each target and watched function of a patch that is found on disk."""
    upstream = upstream_of(patch.upstream)
    if upstream is None:
        return {}
    return {key: source for key in patch.keys if (source := facts.read_source(upstream, key)) is not None}
