"""A probe that an import waits for depends on nothing of the program, and no thread of the program sees it.

The file is vLLM's own, alone under empty packages: what surrounds it takes long to import. Its source counts as unknown.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.site_dir import PROJECT, write_module

CASE = Path(__file__).with_name("probes_case.py")
ONLY = ("vllm-packed-alignment", "vllm-nccl-packed-streams")
LEAF = "vllm.distributed.weight_transfer.packed_tensor"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    site = next(Path(sys.prefix, "lib").glob("python3.*")) / "site-packages"
    write_module(tmp_path / "site", LEAF)
    shutil.copy(
        site.joinpath(*LEAF.split(".")).with_suffix(".py"),
        (tmp_path / "site").joinpath(*LEAF.split(".")).with_suffix(".py"),
    )
    return tmp_path / "site"


def run(packages: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASE)],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{packages}:{PROJECT}",
            "XDG_CACHE_HOME": str(packages.with_name("cache")),
            "ULTRA_PATCHES_ONLY": ",".join(ONLY),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_state_of_the_program_changes_no_verdict_and_no_thread_sees_the_probe(packages: Path) -> None:
    """`put_` refuses to run where a probe has set the deterministic mode."""
    seen = run(packages)
    assert {name: seen["rows"][name][0] for name in ONLY} == dict.fromkeys(ONLY, "applied")
    assert all("probed on import" in seen["rows"][name][1] for name in ONLY[:1])
    assert (seen["thread"]["errors"], seen["thread"]["streams"], seen["thread"]["written"] > 0) == (0, 0, True)
    assert seen["state"] == ["torch.bfloat16", "meta", False]
    kept = list(packages.with_name("cache").rglob("vllm-*"))
    assert len(kept) == len(ONLY), "the next process need not probe"
    assert [path.stat().st_mode & 0o022 for path in {file.parent for file in kept}] == [0]
