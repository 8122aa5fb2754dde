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
        try:
            patch = point.load()
        except (Exception, SystemExit) as error:  # a broken plug-in must not take the others with it
            owner = _owner(point)
            complaints.append(f"patch {point.name!r} of {owner} cannot be read ({error!r}): update or remove {owner}")
            continue
        complaint = _add(found, patch)
        if complaint:
            complaints.append(f"patch {point.name!r} of {_owner(point)} {complaint}")
    if not any(patch.origin == "ultra-patches" for patch in found.values()):
        package = importlib.import_module("ultra_patches.patches")
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                module = importlib.import_module(f"ultra_patches.patches.{info.name}")
                complaint = _add(found, module.PATCH)
                if complaint:
                    complaints.append(f"patch {info.name} {complaint}")
    return dict(sorted(found.items())), complaints


def _add(found: dict[str, Patch], patch: object) -> str | None:
    """What is wrong with a declaration that is left out."""
    if not isinstance(patch, Patch):
        return f"is {type(patch).__name__}, not ultra_patches.patch.Patch: ignored"
    if found.setdefault(patch.id, patch) is not patch:
        return f"takes the id {patch.id!r} of another one: ignored"
    return None


def _owner(point: metadata.EntryPoint) -> str:
    # Asked only where there is something to say: each answer parses a METADATA file.
    return field_of(point.dist, "Name") or "?"
