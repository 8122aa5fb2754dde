"""Interpreters, packages and folders that a user without a passwd entry may read, and processes that run there.

A test's own folder is its user's alone, and so is an interpreter below a home folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import pythons
from tests.unit.site_dir import PROJECT, TESTS, write_distribution, write_module

#: A user that no machine has.
FOREIGN = 54321
CASES = Path(__file__).parent
TIMEOUT_S = 300


class Machine:
    """A folder that everybody may read: the overlay, a stub of vLLM, a declaration, and interpreters."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)
        self.packages = root / "packages"
        shutil.copytree(
            PROJECT / "ultra_patches", self.packages / "ultra_patches", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copytree(_package("packaging"), self.packages / "packaging")
        shutil.copy(TESTS / "unit" / "stub.py", self.packages / "stub.py")
        for case in CASES.glob("*_case.py"):
            shutil.copy(case, self.packages / case.name)
        self.stubs = root / "stubs"
        write_module(self.stubs, "vllm.leaf", "def f():\n    return 'upstream'\n")
        write_distribution(self.stubs, "vllm", "0.20.0")
        declared = "from stub import *\n\ntoy = declare('toy', ('vllm.leaf', 'f'))\n"
        declared += "try:\n    known('affected', toy)\nexcept MemoryError:\n    pass\n"  # where the file is too deep
        write_module(self.stubs, "declared", declared)
        write_distribution(self.stubs, "toy-patches", "1.0", "[ultra_patches.patches]\ntoy = declared:toy\n")

    def python(self, version: str) -> Path | None:
        """An interpreter of this version that everybody may start, None where the machine has none."""
        found = pythons.find(version)
        if found is None:
            return None
        home = self.root / f"python{version}"
        if not home.exists():
            _link(Path(found).resolve().parents[1], home, f"python{version}")
        return home / "bin" / f"python{version}"

    def run(
        self, python: Path, case: str, *arguments: str, real: bool = False, env: Mapping[str, str] | None = None
    ) -> Any:
        """What a case printed as its last line. Fails unless it ends well."""
        path = [self.packages, *([_package("torch").parent] if real else [self.stubs])]
        done = subprocess.run(
            [str(python), str(self.packages / case), *arguments],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.root),
                "PYTHONHOME": str(python.parents[1]),
                "PYTHONPATH": os.pathsep.join(map(str, path)),
                **(env or {}),
            },
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])


def _package(name: str) -> Path:
    return Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages", name)


def _link(prefix: Path, home: Path, name: str) -> None:
    """The interpreter and its standard library under another name, without copying where links can be made."""

    def put(source: str, destination: str) -> None:
        try:
            os.link(source, destination)
        except OSError:
            shutil.copy(source, destination)

    (home / "bin").mkdir(parents=True)
    put(str(prefix / "bin" / name), str(home / "bin" / name))
    left_out = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "config-*")
    shutil.copytree(prefix / "lib" / name, home / "lib" / name, copy_function=put, ignore=left_out)
    for library in (prefix / "lib").glob("libpython*.so*"):
        put(str(library), str(home / "lib" / library.name))
