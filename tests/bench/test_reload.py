"""A whole reload with all patches takes the time and the memory of one without, turn by turn in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.upstream
TIME, MEMORY = 1.05, 1.02


@pytest.mark.parametrize("arguments", [(), ("--not-own",)], ids=["NCCL's copies", "a transport that says nothing"])
def test_time_and_peak_memory(arguments: tuple[str, ...]) -> None:
    # A machine that does something else only ever adds, and may do so through one whole run.
    for _ in range(3):
        seen = run(arguments)
        # The fastest of each, for the same reason.
        ratio = min(seen["times"]["patched"]) / min(seen["times"]["plain"])
        if ratio <= TIME:
            break
    reload = {patch_id: state for patch_id, state in seen["states"].items() if patch_id.startswith("vllm-reload-")}
    assert sorted(reload.values()) == ["applied-late"] * 6 + ["not-needed"], reload
    peaks = {kind: min(values) for kind, values in seen["peaks"].items()}
    print(
        f"time, patched / plain: {ratio:.3f}; peak: {peaks['patched'] / peaks['plain']:.3f} of {seen['tensors']} tensors"
    )
    assert ratio <= TIME
    assert peaks["patched"] <= MEMORY * peaks["plain"] + seen["largest layer"]


def test_wrapt_around_the_same_functions() -> None:
    """What CONTRIBUTING says of wrapt: its cost is no reason against it."""
    times = run(("--wrapt",))["times"]
    ratio = min(times["wrapt"]) / min(times["patched"])
    print(f"time, in wrapt wrappers / without: {ratio:.3f}")
    assert ratio <= TIME


def run(arguments: tuple[str, ...]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("reload_case.py")), "--rounds", "15", *arguments],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "ULTRA_PATCHES": "warn"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen
