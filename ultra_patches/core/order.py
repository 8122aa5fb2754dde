"""The order of patches: each comes after those that it needs or is set over. Pure: declarations in, order and complaints out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType

from ultra_patches.patch import Patch, Variant

#: The `origin` of the overlay's own patches.
OURS = "ultra-patches"


@dataclass(frozen=True)
class Clash:
    """Two patches that replace the same functions, of which nobody says which is set over the other."""

    ids: tuple[str, str]
    #: The functions, as `module:name`.
    keys: tuple[str, ...]
    #: Those of the two that are not set: all but the overlay's own.
    left_out: tuple[str, ...]
    text: str


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


@functools.lru_cache(maxsize=4)
def clashes(patches: tuple[Patch, ...]) -> tuple[Clash, ...]:
    """Each pair with a common target, in variants that one installed release can have, and no order or two between them."""
    before = _before(patches)
    found = []
    for place, one in enumerate(patches):
        for other in patches[place + 1 :]:
            over, under = other.id in before[one.id], one.id in before[other.id]
            if over == under and (keys := _common(one, other)):
                found.append(_clash(one, other, keys, circle=over))
    return tuple(found)


def circles(patches: tuple[Patch, ...]) -> dict[frozenset[str], str]:
    """The ids of each circle of patches that need one another or are declared over one another, and one line on it."""
    before = _before(patches)
    found: dict[frozenset[str], str] = {}
    for patch in patches:
        inside = [p for p in patches if patch.id in before[p.id] and p.id in before[patch.id]]
        if inside:
            named = ", ".join(f"{p.id} ({file_of(p)})" for p in inside)
            found[frozenset(p.id for p in inside)] = (
                f"{named}: declared over or needing one another in a circle, so that no order is right: "
                "take one `over` or `requires` of these away"
            )
    return found


def file_of(patch: Patch) -> str:
    """The file that declares a patch, as far as its probe or its builds tell."""
    builds = [target.build for variant in patch.variants for target in variant.targets]
    codes = [getattr(function, "__code__", None) for function in (patch.probe, *builds)]
    return next((code.co_filename for code in codes if isinstance(code, CodeType)), "file unknown")


def _before(patches: tuple[Patch, ...]) -> dict[str, frozenset[str]]:
    """The ids that come before each patch, by any number of steps; its own among them in a circle."""
    given = {patch.id: declared(patch) for patch in patches}
    reached = {}
    for name, ahead in given.items():
        seen = list(dict.fromkeys(ahead))
        for other in seen:
            seen += [further for further in given.get(other, ()) if further not in seen]
        reached[name] = frozenset(seen)
    return reached


def _common(one: Patch, other: Patch) -> tuple[str, ...]:
    """The functions that both replace where both are set, but for those where the order changes nothing."""
    keys: dict[str, None] = {}
    for mine in one.variants:
        for theirs in other.variants:
            shared = _keys(mine) & _keys(theirs)
            commuting = _commuting(mine) & _commuting(theirs)
            if shared - commuting and _together(one, mine, other, theirs):
                keys.update(dict.fromkeys(sorted(shared - commuting)))
    return tuple(keys)


def _together(one: Patch, mine: Variant, other: Patch, theirs: Variant) -> bool:
    """Whether a release can have both variants: with what both require, no earlier variant of either would be taken."""
    there = _required(mine) | _required(theirs)
    earlier = [*one.variants[: one.variants.index(mine)], *other.variants[: other.variants.index(theirs)]]
    return not any(_required(variant) <= there for variant in earlier)


def _keys(variant: Variant) -> set[str]:
    return {target.key for target in variant.targets}


def _commuting(variant: Variant) -> set[str]:
    return {target.key for target in variant.targets if target.commutes}


def _required(variant: Variant) -> set[str]:
    return {target.key for target in variant.required}


def _clash(one: Patch, other: Patch, keys: tuple[str, ...], *, circle: bool) -> Clash:
    pair = (one, other)
    left_out = tuple(patch.id for patch in pair if patch.origin != OURS)
    what = f"{one.id} ({file_of(one)}) and {other.id} ({file_of(other)}) both replace {', '.join(keys)}"
    why = f"{'each' if circle else 'neither'} is declared over the other"
    effect = (
        "neither is set" if len(left_out) == 2 else f"{left_out[0]} is not set" if left_out else "any may be on top"
    )
    writes = [
        f'over=("{under.id}",) in {over.id}'
        for over, under in (pair, pair[::-1])
        if over.id in left_out or not left_out
    ]
    do = "take one `over` of the circle away" if circle else f"write {' or '.join(writes)}"
    return Clash((one.id, other.id), keys, left_out, f"{what}, and {why}, so that {effect}: {do}")
