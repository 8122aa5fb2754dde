"""A folder of stub packages, and fresh interpreters that see it and nothing of the site-packages."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
PROJECT = TESTS.parent
TIMEOUT_S = 60
REPORT = "report: "


@dataclass(frozen=True)
class Ended:
    """A process that ended; `value` is what it handed to `report`, None where it did not."""

    code: int
    stdout: str
    stderr: str

    @property
    def value(self) -> Any:
        last = (self.stdout.strip().splitlines() or [""])[-1]
        return json.loads(last.removeprefix(REPORT)) if last.startswith(REPORT) else None


class Site:
    """Stub modules and distributions under one folder, first on the path of the interpreters started here."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.cache = cache
        self.declared: list[str] = []
        #: Folders that come before and after the root on the path.
        self.before: list[Path] = []
        self.after: list[Path] = []
        root.mkdir(parents=True, exist_ok=True)

    def write(self, module: str, text: str = "") -> Path:
        """Write `a.b.c` to a/b/c.py, and an empty `__init__.py` into each package above it."""
        return write_module(self.root, module, text)

    def distribution(self, name: str, version: str | None = "1.0", entry_points: str = "") -> Path:
        """Metadata of an installed distribution; a version of None leaves the METADATA file out."""
        return write_distribution(self.root, name, version, entry_points)

    def declare(self, text: str, *ids: str) -> None:
        """Install a distribution that declares patches: `text` assigns each id, with `-` as `_`, in `declared.py`.

        The lock knows nothing but what `text` puts into it with `known`. All other patches are excluded.
        """
        self.declared = list(ids)
        head = "from unit.stub import *\nfrom ultra_patches.patch import *\n\nnothing_known()\n"
        self.write("declared", head + textwrap.dedent(text))
        points = "".join(f"{name} = declared:{name.replace('-', '_')}\n" for name in ids)
        self.distribution("toy-patches", entry_points=f"[ultra_patches.patches]\n{points}")

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        path = [*self.before, self.root, *self.after, PROJECT, TESTS]
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.cache),
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONDONTWRITEBYTECODE": "1",
            **({"ULTRA_PATCHES_ONLY": ",".join(self.declared)} if self.declared else {}),
            **(env or {}),
        }

    def start(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ended:
        """Run the interpreter of this test run with these arguments, without any site-packages."""
        done = subprocess.run(
            [sys.executable, "-S", *arguments],
            env=self.environment(env),
            cwd=cwd or self.cache,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def run(self, code: str, *, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Ended:
        """Run code that may use everything in `unit.stub`. Fails unless it ends well."""
        ended = self.start(*flags, "-c", "from unit.stub import *\n" + textwrap.dedent(code), env=env)
        assert ended.code == 0, ended.stdout + ended.stderr
        return ended

    def ask(self, code: str, *, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Any:
        """Run code and give what it handed to `report`."""
        return self.run(code, flags=flags, env=env).value

    def library(self, *names: str) -> None:
        """Make installed packages importable in the interpreters started here, and only these."""
        folder = self.root.with_name("libraries")
        folder.mkdir(exist_ok=True)
        for name in names:
            spec = importlib.util.find_spec(name)
            assert spec is not None, f"{name} is needed by this test"
            assert spec.origin is not None
            source = Path(spec.origin)
            source = source.parent if source.name == "__init__.py" else source
            (folder / source.name).symlink_to(source)
        if folder not in self.after:
            self.after.append(folder)


def write_module(root: Path, module: str, text: str = "") -> Path:
    """Write `a.b.c` to a/b/c.py under a root, and an empty `__init__.py` into each package above it."""
    *packages, last = module.split(".")
    folder = root
    for package in packages:
        folder = folder / package
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "__init__.py").exists():
            (folder / "__init__.py").write_text("")
    path = folder / f"{last}.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def write_distribution(root: Path, name: str, version: str | None, entry_points: str = "") -> Path:
    """Write a dist-info folder; a version of None leaves its METADATA file out."""
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    if version is not None:
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (folder / "entry_points.txt").write_text(entry_points)
    return folder
