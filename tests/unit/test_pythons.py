"""The package alone on every supported CPython: its wheel, its command, and the unit tests that need nothing of a stack.

A Python that this machine does not have is a skip with a line of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import pythons

from .site_dir import PROJECT

TESTS = ("apply", "apply_foreign", "discover", "facts_files", "gate", "hooks", "lock", "overlay_process", "verdicts")
NEEDED = ("pytest", "pytest-timeout", "hypothesis", "wrapt")


def uv() -> str:
    found = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found, "uv is not there: `make check` sets it up"
    return found


def run(*command: object, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What the command printed. Fails unless it ends well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ULTRA_PATCHES", "PYTHONPATH"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(uv(), "build", "--quiet", "--wheel", "--out-dir", folder, PROJECT, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.parametrize("version", pythons.SUPPORTED)
def test_the_package_works_without_a_stack(version: str, wheel: Path, tmp_path: Path) -> None:
    interpreter = pythons.find(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine: the package was not tested on it")
    run(uv(), "venv", "--quiet", "--python", interpreter, "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(uv(), "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)
    status = json.loads(run(tmp_path / "env/bin/ultra-patches", "status", "--json", cwd=tmp_path))
    assert status["python"].startswith(f"{version}.")
    assert {row["state"] for row in status["patches"]} == {"not-installed"}
    said = run(python, "-W", "error", "-c", "import ultra_patches; print(ultra_patches.__file__)", cwd=tmp_path)
    assert Path(said.strip()).is_relative_to(tmp_path / "env")
    run(uv(), "pip", "install", "--quiet", "--python", python, *NEEDED, cwd=tmp_path)
    files = [f"tests/unit/test_{name}.py" for name in TESTS]
    # The conftest above these tests is for those that need a stack.
    options = ("-q", "-p", "no:cacheprovider", "--confcutdir", "tests/unit")
    said = run(python, "-m", "pytest", *options, *files, cwd=PROJECT)
    assert "skipped" not in said
