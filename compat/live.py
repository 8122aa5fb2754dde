"""Each probe on one release: without patches, with its own alone, and with all patches in force."""

from __future__ import annotations

import datetime
import os
import platform
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata

from compat import matrix, results
from compat.matrix import Cell, Supported
from ultra_patches.patch import Patch
from ultra_patches.proving.verify import Run, Runs, batches, judge, run_patched, run_without


def run(cell: Cell, supported: Supported) -> results.Result:
    """Run every patch of a cell's upstream on its release. Raises fetch.FetchError where it cannot be had."""
    began = time.perf_counter()
    path = matrix.python_path(cell, supported)
    with tempfile.TemporaryDirectory() as cache:
        environ = {
            "PYTHONPATH": path,
            "XDG_CACHE_HOME": cache,  # verdicts of this run, not the user's
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
        }
        root = path.partition(":")[0]
        chosen = matrix.patches_of(cell.upstream)
        beside = [patch.id for patch in results.patches_beside(cell.upstream)]
        rows = dict(row for batch in batches(chosen) for row in _rows(batch, beside, environ, root))
        patches: dict[str, object] = {patch.id: rows[patch.id] for patch in chosen}
    return results.Result(
        cell.upstream,
        cell.release,
        datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        platform.python_version(),
        metadata.version("torch"),
        results.patch_set_digest(cell.upstream),
        round(time.perf_counter() - began, 1),
        patches,
    )


def _rows(
    patches: Sequence[Patch], beside: Sequence[str], environ: Mapping[str, str], root: str
) -> list[tuple[str, dict[str, object]]]:
    """The rows of patches that can share a process."""
    without = run_without(patches, environ=environ)
    patched = run_patched(patches, beside, environ=environ)
    return [(patch.id, _judged(Runs(without[patch.id], *patched[patch.id]), root)) for patch in patches]


def _judged(runs: Runs, root: str) -> dict[str, object]:
    verdict, note = judge(runs, root)
    if runs.without.verdict == "absent":  # the lock learns it from here
        verdict, note = "not needed", runs.without.detail
    return {**{name: _plain(run) for name, run in vars(runs).items()}, "verdict": verdict, "note": note}


def _plain(run: Run) -> dict[str, object]:
    """What is kept of a run: nothing that depends on the folders of this machine."""
    data = asdict(run)
    data["detail"] = re.sub(r"/\S+/(?=\S+\.py)", "", data["detail"])
    return {key: data[key] for key in ("verdict", "detail", "state", "seconds", "import_seconds")}
