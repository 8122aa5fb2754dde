"""The public names keep their types for whoever installs the package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_users_program_passes_mypy_strict(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    # Away from the checkout, where mypy finds the package as a user's does: installed, with its py.typed.
    program = Path(shutil.copy(Path(__file__).with_name("program.py"), tmp_path))
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("mypy")  # torch's types take most of a minute the first time
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(cache), program.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
