"""Rooms, arrows, circles and floors of a small package in a clone of its own, and the command on this one."""

import subprocess
import sys
from pathlib import Path

import pytest

from compat import graph

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
#: `a` and `folder` import each other, once inside a function.
FIRST = {
    "__init__.py": "from ultra_patches import a",
    "a.py": "from ultra_patches.folder import inner\nimport json",
    "below.py": "",
    "folder/__init__.py": "",
    "folder/inner.py": "import ultra_patches.below\ndef f():\n    from ultra_patches import a",
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A commit with a circle, and files without it."""
    for name, text in FIRST.items():
        path = tmp_path / "ultra_patches" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        subprocess.run([*GIT, *command], cwd=tmp_path, check=True)
    (tmp_path / "ultra_patches/folder/inner.py").write_text("import ultra_patches.below")
    return tmp_path


def test_a_revision_has_what_was_committed(clone: Path) -> None:
    rooms = graph.read("HEAD", clone)
    assert rooms.circles == [("a", "folder")]
    assert list(graph.lines(rooms)) == [
        "4 rooms, 4 arrows, 1 circle, 3 floors",
        " 3  __init__ -> a",
        " 2  a <-> folder (circle) -> below",
        " 1  below",
    ]


def test_without_a_revision_the_files_count_as_they_are(clone: Path) -> None:
    rooms = graph.read(root=clone)
    assert list(graph.lines(rooms)) == [
        "4 rooms, 3 arrows, 0 circles, 4 floors",
        " 4  __init__ -> a",
        " 3  a -> folder",
        " 2  folder -> below",
        " 1  below",
    ]


@pytest.mark.parametrize("revision", ["nowhere", "--output=made"])
def test_what_is_no_revision(clone: Path, revision: str) -> None:
    with pytest.raises(graph.GraphError, match=f"at '{revision}'"):
        graph.read(revision, clone)
    assert not (clone / "made").exists()


def test_a_file_that_does_not_parse_is_named(clone: Path) -> None:
    (clone / "ultra_patches/a.py").write_text("import (")
    with pytest.raises(graph.GraphError, match=r"a\.py"):
        graph.read(root=clone)


def test_the_command_counts_this_package() -> None:
    command = [sys.executable, "-m", "compat", "graph"]
    printed = subprocess.run(command, cwd=graph.ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == list(graph.lines(graph.read()))
    assert printed[0].startswith(f"{len(graph.read().imports)} rooms")
    assert "core" in graph.read().imports["cli"]
