"""The version is written when the package is built, and a tree that never was must still be importable."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

import ultra_patches


def test_what_is_installed_has_the_version_of_its_build() -> None:
    assert Version(ultra_patches.__version__) > Version("0")
    assert ultra_patches.__version__ != "0+unknown"


def test_a_tree_that_was_never_built_has_a_version_too(tmp_path: Path) -> None:
    source = Path(ultra_patches.__file__).parent
    shutil.copytree(source, tmp_path / "ultra_patches", ignore=shutil.ignore_patterns("_version.py", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", "import ultra_patches as u; print(u.__file__, u.__version__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(tmp_path / "ultra_patches" / "__init__.py"), "0+unknown"], done.stderr
