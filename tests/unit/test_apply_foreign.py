"""A function that is not the one in the file is someone else's: it is never overwritten, and the error names whose."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import wrapt

from ultra_patches.core import apply
from ultra_patches.patch import Target

from .stub import correct

Load = Callable[[str, str], ModuleType]

MODULE = "toy.meta"
TEXT = "import functools\n\ndef f(x):\n    return 'upstream', x\n\n@functools.lru_cache\ndef cached(x):\n    return x\n"
RIVAL = """\
import functools
import wrapt

def plain(x):
    return "theirs", x

def wrapping(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner

@wrapt.decorator
def traced(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
"""


@pytest.fixture
def meta(load: Load) -> ModuleType:
    return load(MODULE, TEXT)


@pytest.fixture
def rival(load: Load) -> ModuleType:
    return load("toyrival.patcher", RIVAL)


def set_it(module: ModuleType, name: str = "f", *, decorated: bool = False) -> apply.Applied:
    return apply.apply("toy", module, Target(MODULE, name, correct), [], decorated=decorated, late=False)


FOREIGN = {
    "plain function": lambda f, rival: rival.plain,
    "functools.wraps": lambda f, rival: rival.wrapping(f),
    "wrapt": lambda f, rival: rival.traced(f),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_function_is_left_alone_and_named(meta: ModuleType, rival: ModuleType, kind: str) -> None:
    meta.f = theirs = FOREIGN[kind](meta.f, rival)  # type: ignore[attr-defined] # the stub's name
    with pytest.raises(apply.ForeignCodeError) as error:
        set_it(meta)
    assert meta.f is theirs
    assert "toyrival.patcher." in str(error.value)
    assert str(rival.__file__) in str(error.value)


@pytest.mark.parametrize("kind", ["functools.wraps", "wrapt"])
def test_a_foreign_wrapper_around_ours_is_not_ours(meta: ModuleType, rival: ModuleType, kind: str) -> None:
    set_it(meta)
    meta.f = theirs = FOREIGN[kind](meta.f, rival)  # type: ignore[attr-defined] # the stub's name
    with pytest.raises(apply.ForeignCodeError, match=r"toyrival\.patcher"):
        set_it(meta)
    assert meta.f is theirs


def test_a_foreign_wrapper_around_another_patch_of_ours_is_not_overwritten(meta: ModuleType, rival: ModuleType) -> None:
    apply.apply("other", meta, Target(MODULE, "f", correct), [], decorated=False, late=False)
    meta.f = rival.wrapping(meta.f)  # type: ignore[attr-defined] # the stub's name
    with pytest.raises(apply.ForeignCodeError):
        set_it(meta)


def test_code_compiled_under_the_name_of_the_file_is_foreign(meta: ModuleType) -> None:
    text = "\n\ndef f(x):\n    return 'theirs', x\n"
    exec(compile(text, str(meta.__file__), "exec"), vars(meta))
    assert meta.f.__code__.co_filename == meta.__file__
    with pytest.raises(apply.ForeignCodeError):
        set_it(meta)
    assert meta.f(1) == ("theirs", 1)


def test_a_function_whose_code_was_exchanged_is_foreign(meta: ModuleType, rival: ModuleType) -> None:
    meta.f.__code__ = rival.plain.__code__
    with pytest.raises(apply.ForeignCodeError) as error:
        set_it(meta)
    assert str(rival.__file__) in str(error.value)


@pytest.mark.parametrize("value", [print, functools.partial(print), 3])
def test_what_is_no_function_is_foreign(meta: ModuleType, value: object) -> None:
    meta.f = value  # type: ignore[attr-defined] # the stub's name
    with pytest.raises(apply.ForeignCodeError):
        set_it(meta)


def test_a_decorator_in_the_file_is_followed(meta: ModuleType) -> None:
    set_it(meta, "cached", decorated=True)
    assert meta.cached(1) == "corrected"


def test_without_a_decorator_in_the_file_a_wrapper_is_foreign(meta: ModuleType) -> None:
    with pytest.raises(apply.ForeignCodeError, match="lru_cache"):
        set_it(meta, "cached", decorated=False)


def test_a_function_that_has_run_often_is_still_the_original(meta: ModuleType) -> None:
    for _ in range(5000):
        meta.f(1)
    set_it(meta)
    assert meta.f(1) == "corrected"


def test_a_function_under_a_tracer_is_still_the_original(meta: ModuleType) -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: lambda *_: None)  # type: ignore[arg-type, return-value] # traces lines and does nothing
    try:
        for _ in range(50):
            meta.f(1)
        set_it(meta)
    finally:
        sys.settrace(before)
    assert meta.f(1) == "corrected"


def test_a_module_without_a_file_is_taken_as_it_is() -> None:
    made = ModuleType(MODULE)
    exec("def f(x):\n    return 'made', x\n", vars(made))
    set_it(made)
    assert made.f(1) == "corrected"


def test_a_module_whose_file_was_removed_is_taken_as_it_is(meta: ModuleType) -> None:
    path = Path(str(meta.__file__))
    path.unlink()
    for compiled in path.parent.glob("__pycache__/meta.*"):
        compiled.unlink()
    set_it(meta)
    assert meta.f(1) == "corrected"


def test_describe_names_the_wrapper_of_wrapt(meta: ModuleType, rival: ModuleType) -> None:
    shown = apply.describe(rival.traced(meta.f))
    assert "FunctionWrapper that calls" in shown
    assert "toyrival.patcher.traced" in shown
    assert str(rival.__file__) in shown


def test_a_wrapt_proxy_forwards_the_code_of_what_it_wraps(meta: ModuleType, rival: ModuleType) -> None:
    """Why the raw type is looked at: by its code alone the proxy is the original."""
    wrapped = rival.traced(meta.f)
    assert isinstance(wrapped, wrapt.FunctionWrapper)
    assert wrapped.__code__ is meta.f.__code__
