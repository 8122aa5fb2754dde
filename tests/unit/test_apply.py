"""Setting a function, reading it back, rebinding what refers to it, and putting everything back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wrapt
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.core import apply
from ultra_patches.patch import Target

Load = Callable[[str, str], ModuleType]
Write = Callable[..., Path]

MODULE = "toy.meta"
TEXT = """\
def f(x):
    '''Upstream's.'''
    return "upstream", x


class A:
    def method(self, x):
        return "upstream", type(self).__name__, x

    @staticmethod
    def static(x):
        return "upstream", x

    @classmethod
    def of_class(cls, x):
        return "upstream", cls.__name__, x

    class Inner:
        def deep(self, x):
            return "upstream", x
"""


#: A module that takes no new attributes.
STUBBORN = """\
import sys, types
class Stubborn(types.ModuleType):
    def __setattr__(self, name, value):
        pass
def f(x):
    return 'upstream', x
sys.modules[__name__].__class__ = Stubborn
"""


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """Corrects the first word of what the original returns."""

    def corrected(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ("corrected", *original(*args, **kwargs)[1:])

    return corrected


def target(name: str = "f", build: Any = build) -> Target:
    return Target(MODULE, name, build)


def set_it(module: ModuleType, name: str = "f", *, late: bool = False, patch_id: str = "toy") -> apply.Applied:
    return set_target(module, target(name), late=late, patch_id=patch_id)


def set_target(module: ModuleType, to_set: Target, *, late: bool = False, patch_id: str = "toy") -> apply.Applied:
    swaps: list[apply.Swap] = []
    applied = apply.apply(patch_id, module, to_set, swaps, decorated=False, late=late)
    return replace(applied, rebound=apply.rebind(swaps).get(id(applied.replacement), 0))


def take_off(applied: apply.Applied) -> None:
    swaps: list[apply.Swap] = []
    apply.revert(applied, swaps)
    apply.rebind(swaps)


@pytest.fixture
def meta(load: Load) -> ModuleType:
    return load(MODULE, TEXT)


CALLS: dict[str, Callable[[Any], Any]] = {
    "f": lambda m: m.f(1),
    "A.method": lambda m: m.A().method(1),
    "A.static": lambda m: m.A.static(1),
    "A.of_class": lambda m: m.A.of_class(1),
    "A.Inner.deep": lambda m: m.A.Inner().deep(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_set_and_reverted(meta: ModuleType, name: str) -> None:
    before = CALLS[name](meta)
    applied = set_it(meta, name)
    assert CALLS[name](meta) == ("corrected", *before[1:])
    take_off(applied)
    assert CALLS[name](meta) == before


@pytest.mark.parametrize(("name", "kind"), [("A.static", staticmethod), ("A.of_class", classmethod)])
def test_the_descriptor_stays_what_it_was(meta: ModuleType, name: str, kind: type) -> None:
    attribute = name.partition(".")[2]
    original = vars(meta.A)[attribute].__func__
    applied = set_it(meta, name)
    assert type(vars(meta.A)[attribute]) is kind
    assert meta.A().static(1)[1:] == (1,)
    take_off(applied)
    assert type(vars(meta.A)[attribute]) is kind
    assert vars(meta.A)[attribute].__func__ is original


def test_a_subclass_gets_the_correction(meta: ModuleType) -> None:
    child = type("B", (meta.A,), {})
    set_it(meta, "A.of_class")
    assert child.of_class(1) == ("corrected", "B", 1)


def test_what_was_set_looks_like_the_original(meta: ModuleType) -> None:
    set_it(meta)
    assert (meta.f.__name__, meta.f.__doc__, meta.f.__module__) == ("f", "Upstream's.", MODULE)


@pytest.mark.parametrize("name", ["absent", "A.absent", "Absent.method"])
def test_a_missing_target_is_an_attribute_error(meta: ModuleType, name: str) -> None:
    with pytest.raises(AttributeError):
        set_it(meta, name)


def test_a_method_that_is_only_inherited_is_missing(load: Load) -> None:
    module = load(MODULE, TEXT + "\nclass B(A):\n    pass\n")
    with pytest.raises(AttributeError, match=r"B\.method"):
        set_it(module, "B.method")


def test_setting_twice_changes_nothing(meta: ModuleType) -> None:
    first = set_it(meta)
    ours = meta.f
    second = set_it(meta)
    assert meta.f is ours
    assert (second.original, second.replacement) == (first.original, first.replacement)


def test_a_build_that_raises_changes_nothing(meta: ModuleType) -> None:
    def fail(original: Any, module: Any) -> Any:
        raise ValueError("no")

    before = meta.f
    with pytest.raises(ValueError, match="no"):
        set_target(meta, target(build=fail), late=True)
    assert meta.f is before


def test_late_every_stale_reference_is_rebound_counted_and_restored(meta: ModuleType, load: Load) -> None:
    user = load("toy.user", "from toy.meta import f, f as g\n\nclass B:\n    h = f\n    other = len\n")
    foreign = load("toyother", "from toy.meta import f\n")
    original = meta.f
    applied = set_it(meta, late=True)
    assert applied.rebound == 4
    assert user.f is user.g is vars(user.B)["h"] is foreign.f is meta.f
    take_off(applied)
    assert user.f is user.g is vars(user.B)["h"] is foreign.f is meta.f is original


def test_late_a_reference_in_a_class_with_a_metaclass_is_rebound(meta: ModuleType, load: Load) -> None:
    user = load("toy.user", "import abc\nfrom toy.meta import f as f_\n\nclass B(abc.ABC):\n    h = f_\n")
    set_it(meta, late=True)
    assert vars(user.B)["h"] is meta.f


def test_late_nothing_refers_to_it(meta: ModuleType) -> None:
    assert set_it(meta, late=True).rebound == 0


def test_a_name_taken_after_setting_is_restored_too(meta: ModuleType, load: Load) -> None:
    applied = set_it(meta)
    user = load("toy.user", "from toy.meta import f\n")
    assert user.f is meta.f
    take_off(applied)
    assert user.f(1) == ("upstream", 1)


def test_a_method_is_restored_where_a_class_refers_to_it(meta: ModuleType, load: Load) -> None:
    user = load("toy.user", "from toy.meta import A\n\nclass B:\n    method = A.method\n")
    applied = set_it(meta, "A.method", late=True)
    assert applied.rebound == 1
    assert user.B().method(1) == ("corrected", "B", 1)
    take_off(applied)
    assert user.B().method(1) == ("upstream", "B", 1)


def test_replaced_after_ours_is_not_reverted_over(meta: ModuleType) -> None:
    applied = set_it(meta)

    def theirs(x: int) -> None:
        return None

    meta.f = theirs  # type: ignore[attr-defined] # the stub's name
    with pytest.raises(RuntimeError, match=r"toy\.meta:f is now .*theirs.*revert that first"):
        take_off(applied)
    assert meta.f is theirs


def test_reverting_where_the_module_is_gone_restores_what_took_the_name(meta: ModuleType, load: Load) -> None:
    applied = set_it(meta)
    user = load("toy.user", "from toy.meta import f\n")
    del sys.modules[MODULE]
    take_off(applied)
    assert user.f(1) == ("upstream", 1)


def test_a_read_back_that_gives_something_else_is_an_error(stub: Write) -> None:
    stub(MODULE, STUBBORN)
    module = importlib.import_module(MODULE)
    with pytest.raises(RuntimeError, match="reading it back gives another function"):
        set_it(module)


def test_one_patch_over_another_of_ours(meta: ModuleType) -> None:
    first = set_it(meta, patch_id="one")
    second = set_it(meta, patch_id="two")
    take_off(second)
    assert meta.f is first.replacement
    take_off(first)
    assert meta.f(1) == ("upstream", 1)


def test_a_read_back_that_fails_rebinds_nothing(stub: Write, load: Load) -> None:
    stub(MODULE, STUBBORN)
    user = load("toy.user", f"from {MODULE} import f\n")
    module = sys.modules[MODULE]
    before = user.f
    swaps: list[apply.Swap] = []
    with pytest.raises(RuntimeError, match="reading it back"):
        apply.apply("toy", module, target(), swaps, decorated=False, late=True)
    assert (swaps, user.f is before) == ([], True)


def test_one_scan_gives_each_reference_the_last_function_and_counts_it_for_all(meta: ModuleType, load: Load) -> None:
    user = load("toy.user", "from toy.meta import A, f\n\nclass B:\n    g = f\n    method = A.method\n")
    swaps: list[apply.Swap] = []
    below = apply.apply("one", meta, target("f"), swaps, decorated=False, late=True)
    above = apply.apply("two", meta, target("f"), swaps, decorated=False, late=True)
    method = apply.apply("one", meta, target("A.method"), swaps, decorated=False, late=True)
    counts = apply.rebind(swaps)
    assert user.f is user.B.g is meta.f is above.replacement
    assert user.B.method is meta.A.method is method.replacement
    assert [counts[id(one.replacement)] for one in (below, above, method)] == [2, 2, 1]


def test_what_is_set_and_taken_off_before_the_scan_leaves_every_reference(meta: ModuleType, load: Load) -> None:
    user = load("toy.user", "from toy.meta import f\n")
    original = user.f
    swaps: list[apply.Swap] = []
    apply.revert(apply.apply("one", meta, target("f"), swaps, decorated=False, late=True), swaps)
    apply.rebind(swaps)
    assert user.f is meta.f is original


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=8))
def test_one_scan_binds_and_counts_as_a_scan_for_each_swap(drawn: list[tuple[int, int, bool]]) -> None:
    functions = [eval("lambda: None") for _ in range(5)]
    swaps = [apply.Swap(functions[old], functions[new], counted=counted) for old, new, counted in drawn if old != new]
    names = [f"f{number}" for number in range(5)]

    def module() -> ModuleType:
        made = ModuleType("toy_holder")
        vars(made).update(zip(names, functions, strict=True))
        sys.modules["toy_holder"] = made
        return made

    try:
        held, seen = module(), {}
        for swap in swaps:
            for key, count in apply.rebind([swap]).items():
                seen[key] = seen.get(key, 0) + count
        expected = [vars(held)[name] for name in names]
        held = module()
        assert apply.rebind(swaps) == seen
        assert [vars(held)[name] for name in names] == expected
    finally:
        del sys.modules["toy_holder"]


def wrapping(original: Callable[..., Any], module: ModuleType) -> Any:
    """A wrapper of wrapt that corrects the first word, as `build` does."""

    def corrected(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        return ("corrected", *wrapped(*args, **kwargs)[1:])

    return wrapt.FunctionWrapper(original, corrected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("builds", [(wrapping,), (wrapping, wrapping), (build, wrapping), (wrapping, build)])
def test_wrappers_of_wrapt_are_set_over_one_another_and_taken_off(
    meta: ModuleType, load: Load, name: str, builds: tuple[Any, ...]
) -> None:
    user = load("toy.user", "from toy.meta import f, A\n\nclass B:\n    g = f\n")
    before, attributes = CALLS[name](meta), dict(vars(meta.f))
    original = apply.resolve(meta, name).function
    found = [
        set_target(meta, target(name, made), late=True, patch_id=str(number)) for number, made in enumerate(builds)
    ]
    for number, applied in enumerate(found):
        assert apply.owner_of(applied.replacement) == str(number)
        assert apply.is_in_place(applied)
        assert set_target(meta, applied.target, patch_id=str(number)).replacement is applied.replacement
    assert CALLS[name](meta) == ("corrected", *before[1:])
    if name == "f":
        assert user.f is vars(user.B)["g"] is meta.f
        assert [applied.rebound for applied in found] == [2] * len(builds)
    for applied in reversed(found):
        take_off(applied)
    assert apply.resolve(meta, name).function is original
    assert CALLS[name](meta) == before
    assert user.f is vars(user.B)["g"] is meta.f
    assert vars(meta.f) == attributes


def test_a_foreign_wrapper_over_one_of_wrapt_of_ours_is_foreign(meta: ModuleType) -> None:
    applied = set_target(meta, target("f", wrapping))
    meta.f = wrapping(meta.f, meta)  # type: ignore[attr-defined] # the stub's name
    assert apply.owner_of(meta.f) is None
    assert not apply.is_in_place(applied)
    with pytest.raises(RuntimeError, match="FunctionWrapper"):
        take_off(applied)
