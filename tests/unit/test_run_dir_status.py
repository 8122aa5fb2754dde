"""`ULTRA_PATCHES_RUN_DIR` from end to end: real processes on a stub upstream, and what `status --run-dir` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ultra_patches.report import run_dir as run_report

from .site_dir import Site
from .stub import LAYERWISE
from .test_overlay_states import AFFECTED, vllm  # noqa: F401 # the fixture


@pytest.fixture
def run(vllm: Site, tmp_path: Path) -> Path:  # noqa: F811 # as above
    vllm.declare(AFFECTED, "toy")
    return tmp_path / "run"


def status(site: Site, run: Path, *more: str) -> tuple[int, str, str]:
    done = site.start("-m", "ultra_patches", "status", "--run-dir", str(run), *more)
    return done.code, done.stdout, done.stderr


def start(site: Site, run: Path, code: str, **environment: str) -> None:
    site.start("-c", code, env={"ULTRA_PATCHES_RUN_DIR": str(run), **environment})


def test_processes_with_one_patch_set_are_one_group(vllm: Site, run: Path) -> None:  # noqa: F811
    for code in (
        f"import ultra_patches, {LAYERWISE}",
        f"import {LAYERWISE}, ultra_patches",
        "import ultra_patches, vllm",
        "import ultra_patches",
        f"import os, ultra_patches, {LAYERWISE}\nif os.fork(): os.wait()",
    ):
        start(vllm, run, code)
    code, out, err = status(vllm, run)
    assert (code, err) == (0, "")
    report = run_report.read(run)
    assert len(report.processes) == 6, "the fork child writes its own"
    assert {name: len(group) for name, group in report.groups.items()} == {"vllm": 1}
    assert all(str(process.pid) in out for process in report.processes)


@pytest.mark.parametrize(
    ("code", "environment", "said"),
    [
        (f"import ultra_patches, {LAYERWISE}", {"ULTRA_PATCHES": "off"}, "disabled"),
        (f"import ultra_patches, {LAYERWISE}", {"ULTRA_PATCHES_DISABLE": "toy"}, "disabled"),
        (f"import ultra_patches, {LAYERWISE}; ultra_patches.revert('toy')", {}, "reverted"),
        (f"import os, ultra_patches, {LAYERWISE}; os._exit(9)", {"ULTRA_PATCHES": "off"}, "disabled"),
    ],
    ids=["off", "disabled", "reverted", "off and killed"],
)
def test_a_process_without_the_patch_of_the_others_is_named(
    vllm: Site,  # noqa: F811
    run: Path,
    code: str,
    environment: dict[str, str],
    said: str,
) -> None:
    for _ in range(2):
        start(vllm, run, f"import ultra_patches, {LAYERWISE}")
    before = {process.pid for process in run_report.read(run).processes}
    start(vllm, run, code, **environment)
    (other,) = [p for p in run_report.read(run).processes if p.pid not in before]
    exit_code, _, err = status(vllm, run)
    assert exit_code == 1
    (line,) = err.strip().splitlines()
    assert f"pid {other.pid}" in line
    assert "toy" in line
    assert said in line


def test_killed_at_once_it_has_still_written(vllm: Site, run: Path) -> None:  # noqa: F811
    start(vllm, run, f"import os, ultra_patches, {LAYERWISE}; os.kill(os.getpid(), 9)")
    (process,) = run_report.read(run).processes
    assert process.patches["toy"][1] == "applied"


def test_as_json(vllm: Site, run: Path) -> None:  # noqa: F811
    start(vllm, run, f"import ultra_patches, {LAYERWISE}")
    code, out, _ = status(vllm, run, "--json")
    data = json.loads(out)
    assert (code, data["kind"], data["problems"]) == (0, "run-dir", [])
    assert [list(group) for group in data["groups"].values()] == [list(data["groups"]["vllm"])]


def test_a_folder_that_is_not_there_is_one_line(vllm: Site, run: Path) -> None:  # noqa: F811
    code, out, err = status(vllm, run)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert str(run) in err


@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_a_folder_that_cannot_be_written_ends_no_import(vllm: Site, run: Path, mode: str) -> None:  # noqa: F811
    environment = {"ULTRA_PATCHES_RUN_DIR": "/proc/1/run", "ULTRA_PATCHES": mode}
    done = vllm.start("-c", "import ultra_patches, vllm; print('on')", env=environment)
    assert (done.code, done.stdout.strip()) == (0, "on")
    assert "/proc/1/run" in done.stderr
