"""Results as a live run keeps them, made for a test."""

from __future__ import annotations

from compat import results
from compat.matrix import Cell
from ultra_patches.patch import Patch


def made(patch: Patch, verdict: str, detail: str = "seen") -> dict[str, object]:
    """What a live run keeps of one patch, for a verdict of `judge` or `absent`."""
    without, state = {"corrected": ("defect", "applied"), "absent": ("absent", "not-needed")}.get(
        verdict, ("clean", "?")
    )
    row = {"detail": f"{patch.id} {detail}", "seconds": 0.1, "import_seconds": 0.1}
    return {
        "without": {**row, "verdict": without, "state": "disabled"},
        "alone": {**row, "verdict": "clean", "state": state},
        "together": {**row, "verdict": "defect" if verdict == "SPOILED" else "clean", "state": state},
        "verdict": "not needed" if verdict in ("absent", "clean") else verdict,
        "note": f"{detail} at /home/someone/releases/vllm-0.0/vllm/a.py:1",
    }


def keep(cell: Cell, patches: dict[str, object], code: str = "") -> None:
    made_by = ("2026-01-02", "3.12.1", "2.13.0", code or results.patch_set_digest(cell.upstream))
    results.save(cell, results.Result(cell.upstream, cell.release, *made_by, 1.0, patches))
