"""What the tests on real upstream releases share: a script of this folder's neighbours, run against chosen sources."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from compat import fetch
from tests.support import warm

ROOT = Path(__file__).parents[2]
SECONDS = 400


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills, once for all processes of a test run.

    Fails at once in the others where it failed in one.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    failed, made = folder.with_name(f"{name}.failed"), folder.with_name(f"{name}.made")
    with FileLock(f"{folder}.lock"):
        if failed.exists():
            pytest.fail(f"{name} could not be made: {failed.read_text()}")
        if not made.exists():
            try:
                make(folder)
            except BaseException as error:
                failed.write_text(repr(error))
                raise
            made.touch()
    return folder


@dataclass(frozen=True)
class Run:
    """A script in a process of its own, with the sources of some releases before everything else on the path.

    `trees` are (project, release) in the order of PYTHONPATH, without one it is what is installed; `environment` is added to
    the caller's. `edit` is (file, old
    text, new text): a change to the first tree that makes its source one which no release has.
    """

    script: str
    trees: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    edit: tuple[str, str, str] | None = None

    def __str__(self) -> str:
        words = [
            *(release for _, release in self.trees or [("", "installed")]),
            *(value for _, value in self.environment),
            *self.arguments,
        ]
        return " ".join(words + ["edited"] * (self.edit is not None))

    def execute(self, folder: Path) -> dict[str, Any]:
        """Give the JSON of the script's last line. Raises FetchError, or AssertionError where the script failed.

        `folder` is empty and becomes the process's cache, so that no verdict of another run decides.
        """
        trees = [fetch.tree(*tree) for tree in self.trees]
        if self.edit is not None:
            trees[0] = _edited(trees[0], folder / "edited", *self.edit)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ULTRA_PATCHES", "VLLM_"))}
        env = {
            **kept,
            "PYTHONPATH": os.pathsep.join(map(str, [*trees, ROOT])),
            "XDG_CACHE_HOME": str(folder),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_NO_USAGE_STATS": "1",
            # Two of these run at a time.
            **warm.READ_AT_IMPORT,
            **dict(self.environment),
        }
        process = warm.server().run(ROOT / self.script, self.arguments, env, folder, SECONDS)
        assert process.returncode == 0, (
            f"{self.script} on {self} ended with {process.returncode}:\n{process.stderr[-4000:]}"
        )
        result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        roots = trees or [Path(sys.prefix)]
        foreign = [file for file in result["files"] if not any(Path(file).is_relative_to(root) for root in roots)]
        assert not foreign, f"{self.script} on {self} ran {foreign}, not the sources it was given"
        return result


def _edited(tree: Path, copy: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(tree, copy, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
    text = (tree / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} of {tree.name} holds the text to be changed {text.count(old)} times"
    # The links share their content with the cache, so the file is replaced and not written to.
    (copy / file).unlink()
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    return copy


def states(result: Mapping[str, Any]) -> dict[str, str]:
    """The state of each patch by id."""
    return {patch_id: row["state"] for patch_id, row in result["status"].items()}
