"""The live layer: each probe on one release, without and with its patch, in fresh processes."""

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
from ultra_patches.proving.verify import Run, judge, run_probes, together


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
        rows = dict(row for group in together(chosen) for row in _both(group, environ, root))
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


def _both(patches: Sequence[Patch], environ: Mapping[str, str], root: str) -> list[tuple[str, dict[str, object]]]:
    """The rows of patches that can share a process."""
    without = run_probes(patches, patched=False, environ=environ)
    with_patch = run_probes(patches, patched=True, environ=environ)
    return [(patch.id, _judged(without[patch.id], with_patch[patch.id], root)) for patch in patches]


def _judged(without: Run, with_patch: Run, root: str) -> dict[str, object]:
    verdict, note = judge(without, with_patch, root)
    if without.verdict == "absent":  # the lock learns it from here
        verdict, note = "not needed", without.detail
    return {"without": _plain(without), "with": _plain(with_patch), "verdict": verdict, "note": note}


def _plain(run: Run) -> dict[str, object]:
    """A run without the paths and the notes of this machine."""
    data = asdict(run)
    data["detail"] = re.sub(r"/\S+/(?=\S+\.py)", "", data["detail"])
    return {key: data[key] for key in ("verdict", "detail", "state", "seconds", "import_seconds")}
