"""Show each defect on the installed upstream, without and with its patch, in fresh processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ultra_patches import facts
from ultra_patches.evidence import decision_for
from ultra_patches.gate import State
from ultra_patches.patch import Patch, Verdict
from ultra_patches.settings import Settings

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


def run_probe(patch: Patch, *, patched: bool, environ: Mapping[str, str] | None = None, timeout: float = 300) -> Run:
    """Run a patch's probe in a fresh interpreter, with this patch and what it needs alone, or with none."""
    env = {**os.environ, **(environ or {}), "ULTRA_PATCHES": "warn" if patched else "off"}
    env.pop("ULTRA_PATCHES_DISABLE", None)
    env.pop("ULTRA_PATCHES_RUN_DIR", None)  # a probe is no process of the run
    env["ULTRA_PATCHES_ONLY"] = ",".join(_with_needs(patch))
    command = [sys.executable, "-W", "ignore", "-m", "ultra_patches.probe_process", patch.id]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Run(Verdict.INCONCLUSIVE.value, f"no answer within {timeout:.0f} s", "?", "")
    lines = done.stdout.strip().splitlines()
    try:
        data = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
        return Run(Verdict.INCONCLUSIVE.value, f"the process ended with {done.returncode}: {tail}", "?", "")
    keys = ("verdict", "detail", "state", "reason", "seconds", "import_seconds", "files", "note")
    return Run(**{key: data[key] for key in keys})


def _with_needs(patch: Patch) -> list[str]:
    from ultra_patches.ledger import entries

    found = [patch.id]
    for patch_id in found:
        needs = (
            patch.requires if patch_id == patch.id else entries[patch_id].patch.requires if patch_id in entries else ()
        )
        found += [other for other in needs if other not in found]
    return found


def verify(patches: Iterable[Patch], progress: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """One row a patch, in order, two patches at a time. `progress` is told what is about to run."""
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(functools.partial(_verify, progress), patches)


def _verify(progress: Callable[[str], None], patch: Patch) -> Row:
    upstream = facts.locate(patch.upstream)
    if upstream is None:
        return Row(patch.id, patch.upstream, None, None, None, "not installed", f"{patch.upstream} is not installed")
    progress(f"{patch.id}: without the patch")
    without = run_probe(patch, patched=False)
    decision = decision_for(patch, Settings())
    if decision.state is State.NOT_NEEDED and without.verdict in ("clean", "absent"):
        # Nothing would be set, so the second process would run the same code.
        return Row(patch.id, patch.upstream, upstream.version, without, None, "not needed", decision.reason)
    progress(f"{patch.id}: with the patch")
    with_patch = run_probe(patch, patched=True)
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
