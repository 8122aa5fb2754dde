"""Set one function in place of another, and put it back: resolve, check, set, read back, rebind.

Nothing here decides whether to. The functions that were set carry the id of their patch, so that a second call changes
nothing and a foreign replacement is told from ours. Other modules may have taken the function that was replaced: `rebind`
gives them the new one, for many functions in one scan.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ultra_patches.patch import Target

#: wrapt keeps a name with this prefix on the wrapper itself, and passes every other one on to what it wraps.
MARK = "_self_ultra_patch"


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
    rebound: int = 0


@dataclass(frozen=True)
class Swap:
    """A function that gave way to another at its own place, and may still be bound elsewhere."""

    old: Callable[..., Any]
    new: Callable[..., Any]
    #: No module before this one in `sys.modules` can hold the old one; None where any may.
    since: str | None = None
    #: Whether a patch was set; taken off, its references are not counted.
    counted: bool = False


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


def apply(
    patch_id: str, module: ModuleType, target: Target, swaps: list[Swap], *, decorated: bool, late: bool
) -> Applied:
    """Set a target, read it back, and add to `swaps` what is to be rebound; nothing where the patch has set it before.

    `late` says that the module had been executed before, so that any other may have taken the function. Raises
    ForeignCodeError, or RuntimeError where the read-back fails.
    """
    place = resolve(module, target.name)
    top = place.function
    while (owner := owner_of(top)) is not None:
        if owner == patch_id:
            return Applied(target, top.__wrapped__, top)
        top = top.__wrapped__
    if top is place.function:
        check_pristine(module, target.name, place, decorated)
    original = place.function
    replacement = target.build(original, module)
    if getattr(replacement, "__wrapped__", None) is not original:  # a wrapper of wrapt would pass all of this on
        functools.update_wrapper(replacement, original)
    setattr(replacement, MARK, (patch_id, id(replacement)))
    setattr(place.owner, place.attribute, place.wrapped(replacement))
    if resolve(module, target.name).function is not replacement:
        raise RuntimeError(f"{target.key} was set, but reading it back gives another function")
    swaps.append(Swap(original, replacement, None if late else module.__name__, counted=True))
    return Applied(target, original, replacement)


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


def revert(applied: Applied, swaps: list[Swap]) -> None:
    """Put the original back at its place, and add to `swaps` what is to be rebound.

    Patches over ours must have been taken off before. Raises RuntimeError where someone has replaced ours since.
    """
    module = sys.modules.get(applied.target.module)
    if module is not None:
        replaced = replaced_since(applied)
        if replaced is not None:
            raise RuntimeError(f"{replaced}: revert that first, then this patch")
        place = resolve(module, applied.target.name)
        setattr(place.owner, place.attribute, place.wrapped(applied.original))
    swaps.append(Swap(applied.replacement, applied.original))


def rebind(swaps: Sequence[Swap]) -> dict[int, int]:
    """Replace every stale reference in the namespaces of loaded modules and of the classes they hold, in one scan.

    A reference follows the swaps in their order, as if each had been followed by a scan of its own. Gives the references
    that each function of a counted swap took over, by its id().
    """
    ends = {id(swap.old): _followed(swap.old, swaps) for swap in swaps}
    # What is set again in its own place needs no scan.
    ends = {key: (last, passed) for key, (last, passed) in ends.items() if passed or id(last) != key}
    if not ends:
        return {}
    packages = {
        id(swap.old): str(getattr(swap.old, "__module__", "")).partition(".")[0]
        for swap in swaps
        if id(swap.old) in ends
    }
    counts: dict[int, int] = {}
    for namespace, key, function in list(_bindings(packages, _modules(swaps))):
        last, passed = ends[function]
        setattr(namespace, key, last)
        for swap in passed:
            counts[id(swap.new)] = counts.get(id(swap.new), 0) + 1
    return counts


def _followed(function: object, swaps: Sequence[Swap]) -> tuple[object, list[Swap]]:
    """What a reference to a function becomes, and the counted swaps on the way."""
    passed = []
    for swap in swaps:
        if swap.old is function:
            function = swap.new
            if swap.counted:
                passed.append(swap)
    return function, passed


def _modules(swaps: Sequence[Swap]) -> list[object]:
    """The modules that may hold what was replaced: those since the first of the targets', all where one was late."""
    names = list(sys.modules)
    if any(swap.since is None or swap.since not in sys.modules for swap in swaps):
        return list(sys.modules.values())
    first = min(names.index(swap.since) for swap in swaps if swap.since is not None)
    return [sys.modules[name] for name in names[first:]]


def _bindings(packages: Mapping[int, str], modules: Sequence[object]) -> Iterator[tuple[Any, str, int]]:
    """Where functions are bound: namespace, name and id(). `packages` has the top-level package of each by its id()."""
    searched = frozenset(packages.values())
    for module in modules:
        # By its type: `isinstance` would also ask the object, which may be anything in `sys.modules`.
        if not issubclass(type(module), ModuleType):
            continue
        title = vars(module).get("__name__")
        package = title.partition(".")[0] if isinstance(title, str) else ""
        # Classes are searched only where the upstream's own live: everyone else binds at module level.
        own = package in searched
        if not own and packages.keys().isdisjoint(map(id, list(vars(module).values()))):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in packages:
                yield module, key, id(value)
            elif own and issubclass(type(value), type) and value.__module__ == title:
                for name, member in list(vars(value).items()):
                    if packages.get(id(member)) == package:
                        yield value, name, id(member)
