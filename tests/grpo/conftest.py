"""One whole run of the preset; the tests go on from its checkpoints, or start with a few supervised steps."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.grpo.running import ROOT, command, environment, run
from tests.support import once


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "examples.grpo.cpu_preset", str(folder)], cwd=ROOT, check=True)

    return once(tmp_path_factory, "grpo-files", make)


@pytest.fixture(scope="session")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run, with all its checkpoints. It ends at a mean reward of 0.75, to save time."""

    def make(out: Path) -> None:
        found = run(files, out, "keep=100", "grpo.stop_reward=0.75")
        assert found.returncode == 0, found.stderr

    return once(tmp_path_factory, "grpo-whole", make)


@pytest.fixture
def resumed(whole: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Make the folder of a run that had got as far as a checkpoint of the whole one."""

    def make(step: int) -> Path:
        place = tmp_path / "run" / "checkpoints" / f"step-{step}"
        shutil.copytree(whole / "checkpoints" / f"step-{step}", place)
        return tmp_path / "run"

    return make


@pytest.fixture
def started(files: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a run in the background; what is left of it is killed in the end."""
    begun: list[subprocess.Popen[str]] = []

    def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(files, out, *arguments), cwd=ROOT, env=environment(out), stderr=subprocess.PIPE, text=True
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait()
