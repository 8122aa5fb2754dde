"""Run one probe in a process that exists for nothing else: `python -m ultra_patches.probe_process ID`.

Prints one line of JSON on the last line of its output: what the probe saw, how long it took once the upstream was
imported, from which file the upstream came, and what had become of the patch in this process.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback

import ultra_patches
from ultra_patches import discover, settings, verdicts
from ultra_patches.evidence import sources_of
from ultra_patches.gate import choose
from ultra_patches.patch import Finding, Verdict


def main(patch_id: str) -> int:
    patch = discover.patches()[0][patch_id]
    began = time.perf_counter()
    files: dict[str, str | None] = {}
    try:
        if patch.prepare is not None:
            patch.prepare()
        variant = choose(patch, sources_of(patch))
        for target in variant.targets if variant else ():
            module = importlib.import_module(target.module)
            files[target.module] = module.__file__
        imported = time.perf_counter()
        finding = patch.probe() if variant else Finding(Verdict.ABSENT, "the upstream has none of the functions")
    except Exception as error:  # noqa: BLE001 # every way to fail is an answer here
        imported = time.perf_counter()
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0]
        where = f"{last.filename}:{last.lineno}"
        finding = Finding(Verdict.INCONCLUSIVE, f"{type(error).__name__}: {text} ({where})")
    note = None
    if finding.verdict in (Verdict.DEFECT, Verdict.CLEAN) and settings.read([patch_id]).mode == "off":
        # Where the gate knows these sources it does not ask; elsewhere this is what it waits for.
        note = verdicts.keep(patch, sources_of(patch), finding.verdict)
    row = next(row for row in ultra_patches.status() if row.id == patch_id)
    result = {
        "id": patch_id,
        "version": row.version,
        "verdict": finding.verdict.value,
        "detail": finding.detail,
        "seconds": round(time.perf_counter() - imported, 3),
        "import_seconds": round(imported - began, 3),
        "files": files,
        "state": row.state.value,
        "reason": row.reason,
        "note": note,
    }
    print("\n" + json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
