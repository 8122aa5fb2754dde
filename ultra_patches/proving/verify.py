"""Show each defect on the installed upstream, without and with its patch, in fresh processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ultra_patches.core import facts
from ultra_patches.core.evidence import decisions
from ultra_patches.core.gate import State
from ultra_patches.core.settings import Settings
from ultra_patches.patch import Patch, Verdict
from ultra_patches.proving.process import with_needs

#: Verdicts of a row that make `verify` fail.
FAILURES = frozenset({"NOT CORRECTED", "MISJUDGED", "WRONG CODE", "DRIFTED"})


@dataclass(frozen=True)
class Run:
    """One probe in one process; `verdict` is inconclusive where the process died."""

    verdict: str
    detail: str
    state: str
    reason: str
    seconds: float = 0.0
    import_seconds: float = 0.0
    files: Mapping[str, str | None] = field(default_factory=dict)
    note: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table; `without` and `with_patch` are None where there was nothing to run."""

    id: str
    upstream: str
    version: str | None
    without: Run | None
    with_patch: Run | None
    verdict: str
    note: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def run_probes(
    patches: Sequence[Patch], *, patched: bool, environ: Mapping[str, str] | None = None, timeout: float = 600
) -> dict[str, Run]:
    """Run the probes of patches that share an upstream, in forks of one fresh interpreter.

    Each has its own patch and what that needs, or none. Gives a run for each id.
    """
    env = {**os.environ, **(environ or {}), "ULTRA_PATCHES": "warn" if patched else "off"}
    env.pop("ULTRA_PATCHES_DISABLE", None)
    env.pop("ULTRA_PATCHES_RUN_DIR", None)  # a probe is no process of the run
    ids = [patch.id for patch in patches]
    env["ULTRA_PATCHES_ONLY"] = ",".join(dict.fromkeys(need for one in ids for need in with_needs(one)))
    command = [sys.executable, "-W", "ignore", "-m", "ultra_patches.proving.process", *ids]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        silent = Run(Verdict.INCONCLUSIVE.value, f"no answer within {timeout:.0f} s", "?", "")
        return dict.fromkeys(ids, silent)
    tail = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
    dead = Run(Verdict.INCONCLUSIVE.value, f"the process ended with {done.returncode}: {tail}", "?", "")
    return {**dict.fromkeys(ids, dead), **_printed(done.stdout)}


def _printed(output: str) -> dict[str, Run]:
    """What each probe printed, between whatever else the upstream prints."""
    found: dict[str, Run] = {}
    for line in output.splitlines():
        if line.startswith('{"id": '):
            data = json.loads(line)
            known = {f.name for f in fields(Run)}
            found[data["id"]] = Run(**{key: value for key, value in data.items() if key in known})
    return found


def together(patches: Iterable[Patch]) -> list[list[Patch]]:
    """Patches whose probes can share a process: of one upstream, which is imported in the same way."""
    groups: dict[object, list[Patch]] = {}
    for patch in patches:
        groups.setdefault((patch.upstream, patch.prepare), []).append(patch)
    return list(groups.values())


def verify(patches: Iterable[Patch], progress: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """One row a patch, two processes at a time. `progress` is told what is about to run."""
    with ThreadPoolExecutor(2) as pool:
        for rows in pool.map(functools.partial(_verify, progress), together(patches)):
            yield from rows


def _verify(progress: Callable[[str], None], patches: Sequence[Patch]) -> list[Row]:
    name = patches[0].upstream
    upstream = facts.locate(name)
    if upstream is None:
        why = f"{name} is not installed"
        return [Row(patch.id, name, None, None, None, "not installed", why) for patch in patches]
    progress(f"{name}: without patches")
    without = run_probes(patches, patched=False)
    decided = decisions(Settings(), [patch.id for patch in patches])
    # Elsewhere nothing would be set, so a second process would run the same code.
    affected = [
        patch
        for patch in patches
        if decided[patch.id].state is not State.NOT_NEEDED or without[patch.id].verdict not in ("clean", "absent")
    ]
    progress(f"{name}: with each patch")
    patched = run_probes(affected, patched=True) if affected else {}
    return [
        _row(patch, upstream, without[patch.id], patched.get(patch.id), decided[patch.id].reason) for patch in patches
    ]


def _row(patch: Patch, upstream: facts.Upstream, without: Run, with_patch: Run | None, reason: str) -> Row:
    if with_patch is None:
        return Row(patch.id, patch.upstream, upstream.version, without, None, "not needed", reason)
    verdict, said = judge(without, with_patch, str(upstream.root))
    return Row(patch.id, patch.upstream, upstream.version, without, with_patch, verdict, said or without.note or "")


def judge(without: Run, with_patch: Run, root: str) -> tuple[str, str]:
    """What two runs say of a patch, and one line for the user where it is not good."""
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
