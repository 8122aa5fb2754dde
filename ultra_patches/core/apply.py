"""Set one function in place of another, and put it back: resolve, check, set, read back, rebind.

Nothing here decides whether to. The functions that were set carry the id of their patch, so that a second call changes
nothing and a foreign replacement is told from ours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ultra_patches.patch import Target

MARK = "__ultra_patch__"


class ForeignCodeError(Exception):
    """The function is not the one that stands in the file: someone else replaced it. The text says who."""


@dataclass(frozen=True)
class Place:
    """Where a function is bound: `vars(owner)[attribute]` is `raw`, which a staticmethod or classmethod wraps."""

    owner: Any
    attribute: str
    raw: Any

    @property
    def function(self) -> Any:
        return self.raw.__func__ if isinstance(self.raw, (staticmethod, classmethod)) else self.raw

    def wrapped(self, function: Callable[..., Any]) -> Any:
        """Give a function the descriptor of the one it replaces."""
        return type(self.raw)(function) if isinstance(self.raw, (staticmethod, classmethod)) else function


@dataclass(frozen=True)
class Applied:
    """What was set, what was there, and how many stale references outside the target were rebound."""

    target: Target
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    rebound: int


def resolve(module: ModuleType, name: str) -> Place:
    """Find `function` or `Class.method` without triggering descriptors. Raises AttributeError where it is missing."""
    *parents, attribute = name.split(".")
    owner: Any = module
    for part in parents:
        owner = vars(owner)[part] if part in vars(owner) else getattr(owner, part)
    if attribute not in vars(owner):
        raise AttributeError(f"{module.__name__} has no {name}")
    return Place(owner, attribute, vars(owner)[attribute])


def check_pristine(module: ModuleType, name: str, place: Place, decorated: bool) -> None:
    """Raise ForeignCodeError unless the live function is the one that the module's loader compiles from the file.

    A decorator in the file leaves a wrapper around the code, so the chain of `__wrapped__` is followed there, and only
    there: a wrapt proxy forwards `__code__` and would pass for the original.
    """
    expected = _code_on_disk(module, name)
    live = place.function
    while decorated and hasattr(live, "__wrapped__"):
        live = live.__wrapped__
    if type(live) is not FunctionType:
        raise ForeignCodeError(f"{module.__name__}.{name} is {describe(live)}")
    if expected is not None and live.__code__ != expected:
        raise ForeignCodeError(f"{module.__name__}.{name} is {describe(live)}")


def describe(function: Any) -> str:
    """Name a function by module and file, so that a user can find who set it."""
    kind = type(function)
    code = getattr(function, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else "no source"
    # functools.wraps copies __module__; the globals stay those of whoever wrote the function.
    module = function.__globals__.get("__name__") if kind is FunctionType else getattr(function, "__module__", "?")
    shown = f"{module}.{getattr(function, '__qualname__', '?')} ({where})"
    wrapper = getattr(function, "_self_wrapper", None)
    if wrapper is not None:
        return f"a {kind.__module__}.{kind.__qualname__} that calls {describe(wrapper)}"
    return shown if kind is FunctionType else f"a {kind.__module__}.{kind.__qualname__} around {shown}"


def _code_on_disk(module: ModuleType, name: str) -> CodeType | None:
    spec = module.__spec__
    get_code = getattr(spec.loader if spec else None, "get_code", None)
    if get_code is None:
        return None
    try:
        code = get_code(module.__name__)
    except (ImportError, OSError, SyntaxError):
        return None
    for part in name.split("."):
        code = (
            next((c for c in reversed(code.co_consts) if isinstance(c, CodeType) and c.co_name == part), None)
            if code
            else None
        )
    return code if isinstance(code, CodeType) else None


def apply(patch_id: str, module: ModuleType, target: Target, *, decorated: bool, late: bool) -> Applied:
    """Set a target and read it back. Raises ForeignCodeError, or RuntimeError where the read-back fails."""
    place = resolve(module, target.name)
    layer = place.function
    while (owner := owner_of(layer)) is not None:
        if owner == patch_id:
            return Applied(target, layer.__wrapped__, layer, 0)
        layer = layer.__wrapped__
    if layer is place.function:
        check_pristine(module, target.name, place, decorated)
    original = place.function
    replacement = target.build(original, module)
    functools.update_wrapper(replacement, original)
    setattr(replacement, MARK, (patch_id, id(replacement)))
    setattr(place.owner, place.attribute, place.wrapped(replacement))
    rebound = rebind(original, replacement, _since(module, late))
    if resolve(module, target.name).function is not replacement:
        raise RuntimeError(f"{target.key} was set, but reading it back gives another function")
    return Applied(target, original, replacement, rebound)


def owner_of(function: Any) -> str | None:
    """The patch that set exactly this function; a wrapper around ours carries our mark but is not ours."""
    patch_id, identity = getattr(function, MARK, (None, None))
    return patch_id if identity == id(function) else None


def is_in_place(applied: Applied) -> bool:
    """Whether ours still stands there, alone or under other patches."""
    return replaced_since(applied) is None


def replaced_since(applied: Applied) -> str | None:
    """What stands in the place of ours now, None where it is ours or another patch's over ours."""
    module = sys.modules.get(applied.target.module)
    if module is None:
        return None
    try:
        live = resolve(module, applied.target.name).function
    except AttributeError as error:
        return str(error)
    while live is not applied.replacement and owner_of(live) is not None:
        live = live.__wrapped__
    return None if live is applied.replacement else f"{applied.target.key} is now {describe(live)}"


def revert(applied: Applied) -> None:
    """Put the original back wherever ours is bound; patches over ours must have been taken off before.

    Raises RuntimeError where someone has replaced ours since.
    """
    module = sys.modules.get(applied.target.module)
    if module is not None:
        replaced = replaced_since(applied)
        if replaced is not None:
            raise RuntimeError(f"{replaced}: revert that first, then this patch")
        place = resolve(module, applied.target.name)
        setattr(place.owner, place.attribute, place.wrapped(applied.original))
    rebind(applied.replacement, applied.original)


def _since(module: ModuleType, late: bool) -> list[Any]:
    """The modules that may hold the original: all where late, else those imported while the target was executed."""
    names = list(sys.modules)
    if late or module.__name__ not in names:
        return list(sys.modules.values())
    return [sys.modules[name] for name in names[names.index(module.__name__) :]]


def rebind(old: object, new: object, modules: list[Any] | None = None) -> int:
    """Replace every binding of `old` in the namespaces of loaded modules and of the classes they hold; count them."""
    count = 0
    for namespace, key in list(_bindings(old, list(sys.modules.values()) if modules is None else modules)):
        setattr(namespace, key, new)
        count += 1
    return count


def _bindings(function: object, modules: list[Any]) -> Iterator[tuple[Any, str]]:
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    for module in modules:
        if not isinstance(module, ModuleType):
            continue
        # Classes are searched only where the upstream's own live: everyone else binds at module level.
        own = module.__name__.partition(".")[0] == package
        for key, value in list(vars(module).items()):
            if value is function:
                yield module, key
            elif own and issubclass(type(value), type) and value.__module__ == module.__name__:
                for name, member in list(vars(value).items()):
                    if member is function:
                        yield value, name
