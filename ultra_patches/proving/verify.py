"""Show each defect on the installed upstream without its patch, with it alone, and with all patches in force."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ultra_patches.core import facts, settings
from ultra_patches.core.ledger import entries
from ultra_patches.patch import Patch, Verdict
from ultra_patches.proving.process import ALONE, TOGETHER, WITHOUT, with_needs

#: Verdicts of a patch that make `verify` fail.
FAILURES = frozenset({"NOT CORRECTED", "SPOILED", "MISJUDGED", "WRONG CODE", "DRIFTED"})


@dataclass(frozen=True)
class Run:
    """One probe in one process; `verdict` is inconclusive where the process died.

    `spoiled_by` is the patch whose revert makes a probe clean that is clean alone but not together with the others.
    """

    verdict: str
    detail: str
    state: str
    reason: str
    seconds: float = 0.0
    import_seconds: float = 0.0
    files: Mapping[str, str | None] = field(default_factory=dict)
    note: str | None = None
    spoiled_by: str | None = None


@dataclass(frozen=True)
class Runs:
    """The runs of one probe: without patches; alone with its own and what that needs; together with all in force.

    `together` is None where it was not asked for.
    """

    without: Run
    alone: Run
    together: Run | None


@dataclass(frozen=True)
class Proof:
    """One line of the table; the runs are None where there was nothing to run."""

    id: str
    upstream: str
    version: str | None
    without: Run | None
    alone: Run | None
    together: Run | None
    verdict: str
    note: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def run_without(
    patches: Sequence[Patch], *, environ: Mapping[str, str] | None = None, timeout: float = 600
) -> dict[str, Run]:
    """Run the probes of patches that share an upstream without patches, in forks of one fresh interpreter."""
    env = {**(environ or {}), "ULTRA_PATCHES": "off"}
    return {patch_id: runs[WITHOUT] for patch_id, runs in _run(patches, (), [WITHOUT], env, timeout).items()}


def run_patched(
    patches: Sequence[Patch],
    beside: Collection[str] | None,
    *,
    environ: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> dict[str, tuple[Run, Run | None]]:
    """Run the probes with patches, in forks of one fresh interpreter: the run alone and the run together of each.

    Alone, the patch of the probe and those that it needs are in force; together, also those of `beside` that are needed on
    what is installed. Where `beside` is None there is no run together.
    """
    env = {**(environ or {}), "ULTRA_PATCHES": "warn"}
    modes = [ALONE] if beside is None else [ALONE, TOGETHER]
    ended = _run(patches, beside, modes, env, timeout)
    return {patch_id: (runs[ALONE], runs.get(TOGETHER)) for patch_id, runs in ended.items()}


def _run(
    patches: Sequence[Patch],
    beside: Collection[str] | None,
    modes: Sequence[str],
    environ: Mapping[str, str],
    timeout: float,
) -> dict[str, dict[str, Run]]:
    """The run of each id and mode, in one process; inconclusive where the process ended before it."""
    ids = [patch.id for patch in patches]
    env = {**os.environ, **environ}
    env.pop("ULTRA_PATCHES_DISABLE", None)
    env.pop("ULTRA_PATCHES_RUN_DIR", None)  # a probe is no process of the run
    needed = [need for one in ids for need in with_needs(one)]
    env["ULTRA_PATCHES_ONLY"] = ",".join(dict.fromkeys([*needed, *(beside or ())]))
    command = [sys.executable, "-W", "ignore", "-m", "ultra_patches.proving.process", *ids]
    command += [] if beside is None else ["--beside", *beside]

    def filled(why: str, found: Mapping[tuple[str, str], Run]) -> dict[str, dict[str, Run]]:
        dead = Run(Verdict.INCONCLUSIVE.value, why, "?", "")
        return {one: {mode: found.get((one, mode), dead) for mode in modes} for one in ids}

    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return filled(f"no answer within {timeout:.0f} s", {})
    tail = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
    return filled(f"the process ended with {done.returncode}: {tail}", _printed(done.stdout))


def _printed(output: str) -> dict[tuple[str, str], Run]:
    """What each run printed, by id and mode, between whatever else the upstream prints."""
    found: dict[tuple[str, str], Run] = {}
    known = {f.name for f in fields(Run)}
    for line in output.splitlines():
        if line.startswith('{"id": '):
            data = json.loads(line)
            found[data["id"], data["mode"]] = Run(**{key: value for key, value in data.items() if key in known})
    return found


def batches(patches: Iterable[Patch]) -> list[list[Patch]]:
    """Patches whose probes can share a process: of one upstream, which is imported in the same way."""
    groups: dict[object, list[Patch]] = {}
    for patch in patches:
        groups.setdefault((patch.upstream, patch.prepare), []).append(patch)
    return list(groups.values())


def verify(
    patches: Iterable[Patch], progress: Callable[[str], None] = lambda _: None, *, alone: bool = False
) -> Iterator[Proof]:
    """One row a patch, two processes at a time. `progress` is told what is about to run.

    With `alone` no patch is tried together with the others.
    """
    chosen = settings.read(entries)
    beside = None if alone else [patch_id for patch_id in entries if not chosen.excludes(patch_id)]
    with ThreadPoolExecutor(2) as pool:
        for rows in pool.map(functools.partial(_verify, progress, beside), batches(patches)):
            yield from rows


def _verify(progress: Callable[[str], None], beside: Collection[str] | None, patches: Sequence[Patch]) -> list[Proof]:
    name = patches[0].upstream
    upstream = facts.locate(name)
    if upstream is None:
        why = f"{name} is not installed"
        return [Proof(patch.id, name, None, None, None, None, "not installed", why) for patch in patches]
    progress(f"{name}: without patches")
    without = run_without(patches)
    progress(f"{name}: with each patch" if beside is None else f"{name}: with each patch, alone and together")
    patched = run_patched(patches, beside)
    rows = []
    for patch in patches:
        runs = Runs(without[patch.id], *patched[patch.id])
        verdict, note = judge(runs, str(upstream.root))
        said = note or runs.without.note or ""
        rows.append(Proof(patch.id, name, upstream.version, runs.without, runs.alone, runs.together, verdict, said))
    return rows


def judge(runs: Runs, root: str) -> tuple[str, str]:
    """What the runs of a probe say of its patch, the worse of alone and together, and one line where it is not good.

    `root` is where the upstream lies that was to be run.
    """
    verdict, note = _judge(runs.without, runs.alone, root)
    if runs.together is None or verdict in FAILURES:
        return verdict, note
    whole, why = _judge(runs.without, runs.together, root)
    seen = runs.together
    if seen.spoiled_by:
        return (
            "SPOILED",
            f"spoiled by {seen.spoiled_by}: clean after revert of {seen.spoiled_by}; with it {seen.detail}",
        )
    if (runs.alone.verdict, seen.verdict) == ("clean", "defect"):
        return (
            "SPOILED",
            f"clean alone, but not with all patches in force, nor after revert of any single one: {seen.detail}",
        )
    if whole in FAILURES or (whole == "inconclusive" and verdict != whole):
        return whole, f"with all patches in force: {why}"
    return verdict, note


def _judge(without: Run, with_patch: Run, root: str) -> tuple[str, str]:
    # The parts of Megatron lie side by side, and a patch may touch several of them.
    top = Path(root).parent if Path(root).parent.name == "megatron" else Path(root)
    files = [f for run in (without, with_patch) for f in run.files.values() if f]
    foreign = [f for f in files if not Path(f).is_relative_to(top)]
    if foreign:
        return "WRONG CODE", f"the probe ran {foreign[0]}, not the upstream at {root}: check PYTHONPATH"
    if without.verdict == "absent":
        gone = with_patch.state == "not-needed"
        return ("not needed" if gone else "DRIFTED"), with_patch.reason
    seen = (without.verdict, with_patch.verdict)
    applied = with_patch.state in ("applied", "applied-late")
    if "inconclusive" in seen:
        bad = without if without.verdict == "inconclusive" else with_patch
        return "inconclusive", bad.detail
    if seen == ("defect", "clean"):
        return ("corrected", "") if applied else ("MISJUDGED", f"clean although the patch is {with_patch.state}")
    if without.verdict == "defect" and with_patch.state == "not-needed":
        return "MISJUDGED", f"the defect shows, but the patch counts as not needed: {with_patch.reason}"
    if without.verdict == "defect":
        return "NOT CORRECTED", f"{with_patch.state}: {with_patch.reason or with_patch.detail}"
    if with_patch.verdict == "defect":
        return "NOT CORRECTED", f"the patch brings the defect: {with_patch.detail}"
    return ("MISJUDGED", "set although the defect does not show") if applied else ("not needed", with_patch.reason)
