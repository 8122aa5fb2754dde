"""Arming where the upstream is loaded already: one scan of all modules for everything that is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.upstream
CASE = Path(__file__).with_name("late_case.py")
#: Of `importlib.reload(ultra_patches)` with everything in force.
BUDGET_S = 0.2
#: For setting everything again after `disarm`, in times that looking at each binding of every module once takes: 0.17 s
#: where that takes 0.09. A scan for each target took 7 and more.
LOOKS = 2.5


def test_a_late_import_scans_the_modules_once() -> None:
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "ULTRA_PATCHES": "warn"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASE)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    took = {what: min(seconds) for what, seconds in seen["took"].items()}
    print(f"CPU seconds among {seen['modules']} modules: {took}")
    assert took["reload"] <= BUDGET_S
    assert took["set again"] <= LOOKS * took["look"]
    first, *others = seen["states"]
    assert sum(state == "applied-late" and rebound > 0 for state, rebound in first.values()) >= 3, first
    assert all(one == first for one in others)
    assert seen["left"] == []
