"""A real torchrun: each rank proves what it has, and one that was started without the import is named by its number."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]
SCRIPT = """
import os, sys
if os.environ["RANK"] not in sys.argv[1:]:
    import ultra_patches
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


@pytest.mark.parametrize("without", [[], ["1"]], ids=["all", "all but one"])
def test_the_ranks_of_torchrun(without: list[str], tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("ULTRA_PATCHES")}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        *without,
    ]
    done = subprocess.run(
        command,
        env={**env, "ULTRA_PATCHES_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = subprocess.run(
        [sys.executable, "-m", "ultra_patches", "status", "--run-dir", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    data = json.loads(said.stdout)
    assert [process["rank"] for process in data["processes"]] == ([0, 1] if not without else [0])
    assert said.returncode == (1 if without else 0)
    assert [problem.partition(" at ")[0] for problem in data["problems"]] == ["rank 1 of 2"] * len(without)
