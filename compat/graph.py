"""`python -m compat graph [REV]`: the rooms of the package, what each imports, circles and floors.

A room is a module or folder directly in `ultra_patches`, or its `__init__`. A room stands one floor above the highest room
that it imports; rooms of a circle stand on one floor. Imports inside functions count too.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import networkx

ROOT = Path(__file__).parent.parent
PACKAGE = "ultra_patches"
# In a fresh interpreter, because grimp looks a package up as an import does, and this process has imported ours.
LISTING = f"""
import grimp, json
graph = grimp.build_graph({PACKAGE!r}, cache_dir=None)
print(json.dumps({{module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}}))
"""


class GraphError(Exception):
    """A revision that has no package to read."""


@dataclass(frozen=True)
class Rooms:
    #: Each room, and the rooms that it imports.
    imports: dict[str, frozenset[str]]

    @property
    def arrows(self) -> int:
        return sum(map(len, self.imports.values()))

    @property
    def floors(self) -> list[list[tuple[str, ...]]]:
        """From the lowest: one tuple a room, or a circle."""
        graph = networkx.DiGraph(self.imports)
        whole = networkx.condensation(graph)
        generations = networkx.topological_generations(whole.reverse(copy=False))
        return [sorted(tuple(sorted(whole.nodes[n]["members"])) for n in floor) for floor in generations]

    @property
    def circles(self) -> list[tuple[str, ...]]:
        return [rooms for floor in self.floors for rooms in floor if len(rooms) > 1]


def read(revision: str | None = None, root: Path = ROOT) -> Rooms:
    """The rooms of a git revision of the clone at root, or of its files as they are. Raises GraphError."""
    if revision is None:
        return _rooms(root)
    with _checked_out(revision, root) as tree:
        return _rooms(tree)


def lines(rooms: Rooms) -> Iterator[str]:
    """The counts, then each floor from the top."""
    circles = len(rooms.circles)
    yield (
        f"{len(rooms.imports)} rooms, {rooms.arrows} arrows, "
        f"{circles} circle{'' if circles == 1 else 's'}, {len(rooms.floors)} floors"
    )
    for number, floor in reversed(list(enumerate(rooms.floors, 1))):
        for together in floor:
            circle = " (circle)" if len(together) > 1 else ""
            below = sorted(frozenset[str]().union(*(rooms.imports[room] for room in together)).difference(together))
            yield f"{number:2}  {' <-> '.join(together)}{circle}" + (f" -> {' '.join(below)}" if below else "")


@contextmanager
def _checked_out(revision: str, root: Path) -> Iterator[Path]:
    command = ["git", "archive", "--end-of-options", revision, PACKAGE]
    done = subprocess.run(command, cwd=root, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise GraphError(
            f"git has no {PACKAGE} at {revision!r} ({said[-1]}): name a commit, tag or branch of this clone"
        )
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def _rooms(tree: Path) -> Rooms:
    command = [sys.executable, "-P", "-c", LISTING]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise GraphError(
            f"grimp cannot read {PACKAGE} in {tree}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    modules: dict[str, list[str]] = json.loads(done.stdout)
    imports: dict[str, set[str]] = {_room(module): set() for module in modules}
    for module, below in modules.items():
        imports[_room(module)].update(_room(name) for name in below)
    return Rooms({room: frozenset(below - {room}) for room, below in sorted(imports.items())})


def _room(module: str) -> str:
    return [*module.split("."), "__init__"][1]
