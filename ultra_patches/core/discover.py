"""Find the declared patches: entry points in the group `ultra_patches.patches`, the overlay's own included."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from ultra_patches.core.declaration import fault
from ultra_patches.core.facts import field_of, search_path
from ultra_patches.core.order import OURS
from ultra_patches.errors import one_line
from ultra_patches.patch import Patch

GROUP = "ultra_patches.patches"
_OWN = "ultra_patches.patches."


def patches() -> tuple[dict[str, Patch], list[str]]:
    """Every patch by id, and one line for each declaration that cannot be used.

    Where the package runs from a source tree whose metadata was not installed, its own patches are read from the folder.
    """
    points, complaints = _points()
    own = [point for point in points if point.value.startswith(_OWN)]
    others = [(point, _read(point)) for point in points if not point.value.startswith(_OWN)]
    if not own and not any(isinstance(read, Patch) and read.origin == OURS for _, read in others):
        own = _of_the_folder()
    found: dict[str, Patch] = {}
    # Ours first: no other distribution takes the id of one.
    for point, read in [*((point, _read(point)) for point in own), *others]:
        if isinstance(read, str):
            complaints.append(read)
        elif found.setdefault(read.id, read) is not read:
            complaints.append(_ignored(point, f"takes the id {read.id!r} of another one"))
    return dict(sorted(found.items())), complaints


def _points() -> tuple[list[metadata.EntryPoint], list[str]]:
    """The entry points of the group, and one line for each distribution whose entry points cannot be read."""
    try:
        return list(metadata.entry_points(group=GROUP)), []
    except Exception as first:
        # One broken file takes those of all distributions with it; then they are asked one by one.
        points: dict[str, list[metadata.EntryPoint]] = {}
        complaints = []
        try:
            for distribution in metadata.distributions(path=search_path()):
                name = _name(distribution)
                try:
                    points.setdefault(name, [point for point in distribution.entry_points if point.group == GROUP])
                except Exception as error:
                    complaints.append(
                        f"the entry points of {name} cannot be read ({one_line(error)}): reinstall {name}"
                    )
        except Exception as error:
            complaints.append(f"the installed metadata cannot be listed ({one_line(error)}): pip check")
        if not complaints:
            complaints.append(f"entry points cannot be read ({one_line(first)}): pip check")
        return [point for some in points.values() for point in some], complaints


def _of_the_folder() -> list[metadata.EntryPoint]:
    folder: Iterable[str] = importlib.import_module(GROUP).__path__
    names = [info.name for info in pkgutil.iter_modules(folder) if not info.name.startswith("_")]
    return [metadata.EntryPoint(name, f"{_OWN}{name}:PATCH", GROUP) for name in names]


def _read(point: metadata.EntryPoint) -> Patch | str:
    """What is declared, or one line on why it is left out."""
    try:
        patch = point.load()
        wrong = fault(patch)
    except KeyboardInterrupt:  # the user's, or not to be told from it
        raise
    except BaseException as error:  # a broken plug-in must not take the others with it
        owner = _name(point.dist)
        return f"patch {point.name!r} of {owner} cannot be read ({one_line(error)}): update or remove {owner}"
    return patch if wrong is None else _ignored(point, wrong)


def _ignored(point: metadata.EntryPoint, wrong: str) -> str:
    return f"patch {point.name!r} of {_name(point.dist)} {wrong}: ignored"


def _name(distribution: metadata.Distribution | None) -> str:
    """The name of a distribution, else the folder of its metadata."""
    # Asked only where there is something to say: each answer parses a METADATA file.
    name = field_of(distribution, "Name")
    return name or Path(str(getattr(distribution, "_path", "?"))).name
