"""The live layer: each probe on one release, without and with its patch, in fresh processes."""

from __future__ import annotations

import datetime
import os
import platform
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata

from compat import matrix, results
from compat.matrix import Cell, Supported
from ultra_patches.patch import Patch
from ultra_patches.verify import judge, run_probe


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
        with ThreadPoolExecutor(2) as pool:
            rows = list(pool.map(lambda patch: _both(patch, environ, root), chosen))
        patches: dict[str, object] = {patch.id: row for patch, row in zip(chosen, rows, strict=True)}
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


def _both(patch: Patch, environ: Mapping[str, str], root: str) -> dict[str, object]:
    without = run_probe(patch, patched=False, environ=environ)
    with_patch = run_probe(patch, patched=True, environ=environ)
    verdict, note = judge(without, with_patch, root)
    if without.verdict == "absent":  # the lock learns it from here
        verdict, note = "not needed", without.detail
    return {"without": _plain(without), "with": _plain(with_patch), "verdict": verdict, "note": note}


def _plain(run: object) -> dict[str, object]:
    """A run without the paths and the notes of this machine."""
    data = asdict(run)  # type: ignore[call-overload] # a dataclass instance
    data["detail"] = re.sub(r"/\S+/(?=\S+\.py)", "", data["detail"])
    return {key: data[key] for key in ("verdict", "detail", "state", "seconds", "import_seconds")}
