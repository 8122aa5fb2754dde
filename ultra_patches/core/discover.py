"""Find the declared patches: entry points in the group `ultra_patches.patches`, the overlay's own included."""

from __future__ import annotations

import importlib
import pkgutil
from importlib import metadata

from ultra_patches.core.facts import field_of
from ultra_patches.patch import Patch

GROUP = "ultra_patches.patches"


def patches() -> tuple[dict[str, Patch], list[str]]:
    """Every patch by id, and one line for each declaration that could not be read.

    Where the package runs from a source tree whose metadata was not installed, its own patches are read from the folder.
    """
    found: dict[str, Patch] = {}
    complaints: list[str] = []
    for point in metadata.entry_points(group=GROUP):
        owner = field_of(point.dist, "Name") or "?"
        try:
            patch = point.load()
        except (Exception, SystemExit) as error:  # a broken plug-in must not take the others with it
            complaints.append(f"patch {point.name!r} of {owner} cannot be read ({error!r}): update or remove {owner}")
            continue
        _add(found, complaints, patch, f"{point.name!r} of {owner}")
    if not any(patch.origin == "ultra-patches" for patch in found.values()):
        package = importlib.import_module("ultra_patches.patches")
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                module = importlib.import_module(f"ultra_patches.patches.{info.name}")
                _add(found, complaints, module.PATCH, info.name)
    return dict(sorted(found.items())), complaints


def _add(found: dict[str, Patch], complaints: list[str], patch: object, source: str) -> None:
    if not isinstance(patch, Patch):
        complaints.append(f"patch {source} is {type(patch).__name__}, not ultra_patches.patch.Patch: ignored")
    elif patch.id in found and found[patch.id] is not patch:
        complaints.append(f"patch {source} takes the id {patch.id!r} of another one: ignored")
    else:
        found[patch.id] = patch
