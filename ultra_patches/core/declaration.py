"""What is wrong with the declaration of a patch, told before anything is made of it: others share what reads them all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ultra_patches.patch import Patch, Target, Variant

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _text(value: object) -> bool:
    return isinstance(value, str)


def _function(value: object) -> bool:
    return callable(value)


def _many(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(isinstance(one, kind) for one in value)


def _maybe(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


#: For each annotation of a field of Patch, Variant and Target: what is wanted, and whether a value is that.
KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "str": ("a text", _text),
    "str | None": ("a text or None", _maybe(_text)),
    "bool": ("a bool", lambda value: isinstance(value, bool)),
    "Build": ("a function", _function),
    "Callable[[], Finding]": ("a function", _function),
    "Callable[[], None] | None": ("a function or None", _maybe(_function)),
    "tuple[str, ...]": ("a tuple of texts", _many(str)),
    "tuple[Variant, ...]": ("a tuple of Variant", _many(Variant)),
    "tuple[Target, ...]": ("a tuple of Target", _many(Target)),
}


def fault(patch: object) -> str | None:
    """One line on what keeps a declaration from being used, None where nothing does."""
    if not isinstance(patch, Patch):
        return f"is {type(patch).__name__}, not ultra_patches.patch.Patch"
    wrong = _wrong_types(patch)
    if wrong:
        return wrong
    if not _ID.fullmatch(patch.id):
        return f"has id {patch.id!r}, not letters, digits, dots, dashes and underscores"
    if not patch.variants:
        return "has no variant"
    for variant in patch.variants:
        if not variant.required:
            return f"has no required target in variant {variant.name!r}"
        for target in variant.targets:
            if not all(part.isidentifier() for part in (*target.module.split("."), *target.name.split("."))):
                return f"has target {target.key!r}, not package.module and function or Class.method"
    return None


def _wrong_types(made: Any) -> str | None:
    for field in fields(made):
        wanted, fits = KINDS[str(field.type)]
        value = getattr(made, field.name)
        if not fits(value):
            return f"has {type(value).__name__} for {field.name} of {type(made).__name__}, not {wanted}"
        for inner in value if isinstance(value, tuple) else ():
            if isinstance(inner, (Variant, Target)) and (wrong := _wrong_types(inner)):
                return wrong
    return None
