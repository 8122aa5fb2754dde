"""The order of patches: each comes after those that it needs or is set over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ultra_patches.patch import Patch


def declared(patch: Patch) -> tuple[str, ...]:
    """The ids of the patches that come before this one."""
    return (*patch.requires, *patch.over)


def in_order(patches: Mapping[str, Patch], before: Callable[[Patch], Iterable[str]] = declared) -> dict[str, Patch]:
    """Each patch after those whose ids `before` gives for it. In a circle, the one that is met first comes last."""
    ordered: dict[str, Patch] = {}
    begun: set[str] = set()

    def add(patch: Patch) -> None:
        begun.add(patch.id)
        for other in before(patch):
            if other in patches and other not in begun:
                add(patches[other])
        ordered[patch.id] = patch

    for patch in patches.values():
        if patch.id not in begun:
            add(patch)
    return ordered
