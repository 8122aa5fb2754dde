"""A process without the overlay leaves no file; whoever started it does, and names it."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from ultra_patches.report import run_dir as run_report
from ultra_patches.run_dir import children
from ultra_patches.run_dir import writer as rundir

from .site_dir import Site
from .stub import META

ARMED = "import os\nimport ultra_patches\nimport vllm.model_executor.model_loader.reload.meta\n"


@pytest.fixture
def vllm(site: Site) -> Site:
    site.write(META, "def f():\n    return 'upstream'\n")
    site.distribution("vllm", "0.26.0")
    site.declare("toy = declare('toy', (META, 'f'))\nknown('affected', toy)", "toy")
    return site


def starts(site: Site, how: str, *names: str) -> str:
    """A program that arms the overlay and starts children of these names; `target` is what each runs."""
    return site.write(
        "program",
        f"""
        import multiprocessing, os, sys

        def silent():
            import vllm.model_executor.model_loader.reload.meta

        def armed():
            import ultra_patches, vllm.model_executor.model_loader.reload.meta

        if __name__ == "__main__":
            import ultra_patches, vllm.model_executor.model_loader.reload.meta
            context = multiprocessing.get_context({how!r})
            for name in {names!r}:
                child = context.Process(target=armed if name.endswith("1") else silent, name=name)
                child.start()
                child.join()
            print(child.pid)
        """,
    ).as_posix()


def status(site: Site, folder: Path) -> tuple[int, str]:
    ended = site.start("-m", "ultra_patches", "status", "--run-dir", str(folder))
    return ended.code, " ".join((ended.stdout + ended.stderr).split())


def test_a_worker_without_the_overlay_is_named(vllm: Site, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = starts(vllm, "spawn", "VllmWorker-1", "VllmWorker-0")
    ended = vllm.start(program, env={"ULTRA_PATCHES_RUN_DIR": str(folder)})
    assert ended.code == 0, ended.stderr
    code, said = status(vllm, folder)
    assert code == 1
    assert said.count("left no file") == 1
    assert f"pid {ended.stdout.strip()} (VllmWorker-0), started by pid" in said
    assert "ultra-patches doctor" in said


@pytest.mark.parametrize("name", ["VllmWorker-1", "Process-2", "DataLoader"])
def test_children_that_have_it_or_need_it_not_are_passed_over(vllm: Site, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    ended = vllm.start(starts(vllm, "spawn", name), env={"ULTRA_PATCHES_RUN_DIR": str(folder)})
    assert ended.code == 0, ended.stderr
    code, said = status(vllm, folder)
    assert (code, "left no file" in said) == (0, False), said


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 1, 3], [3]])
def test_a_rank_of_a_launcher_that_left_no_file_is_named(vllm: Site, tmp_path: Path, ranks: list[int]) -> None:
    folder = tmp_path / "run"
    for rank in ranks:
        launcher = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
        vllm.run(ARMED, env={"ULTRA_PATCHES_RUN_DIR": str(folder), **launcher})
    code, said = status(vllm, folder)
    missing = [str(rank) for rank in range(4) if rank not in ranks]
    assert code == (1 if missing else 0)
    assert (f"rank {', '.join(missing)} of 4 at head:29500 left no file" in said) is bool(missing)


@pytest.mark.parametrize("world", ["", "two", "-1", "²"])
def test_an_odd_environment_is_no_launcher(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    assert children.launched() is None


def test_multiprocessing_is_left_as_it_was() -> None:
    before = BaseProcess.start
    children.watch(lambda: None)
    assert BaseProcess.start is not before
    children.unwatch()
    assert BaseProcess.start is before is multiprocessing.Process.start


def test_a_file_of_before_is_still_read(tmp_path: Path) -> None:
    """What an older overlay wrote has neither children nor a launcher."""
    rundir.write(tmp_path, [])
    (path,) = tmp_path.glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    del content["children"], content["launched"]
    path.write_text(json.dumps(content))
    assert run_report.silent(run_report.read(tmp_path)) == []
