"""A hook is called each time its module has been executed, and only then; the import stays what it was."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ultra_patches.core import guard, hooks
from ultra_patches.errors import UltraPatchesError, UltraPatchesWarning

Write = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("own_hooks")

LEAF = "toy.a.leaf"


@pytest.fixture
def calls() -> list[tuple[ModuleType, bool, list[str]]]:
    """What the hook was given: the module, whether it was late, and the names in the module at that time."""
    return []


@pytest.fixture
def hook(calls: list[tuple[ModuleType, bool, list[str]]]) -> Callable[[ModuleType, bool], None]:
    def record(module: ModuleType, late: bool) -> None:
        calls.append((module, late, [name for name in vars(module) if not name.startswith("__")]))

    return record


Hook = Callable[[ModuleType, bool], None]
Calls = list[tuple[ModuleType, bool, list[str]]]


def test_called_once_the_module_has_been_executed(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF, "first = 1\nlast = 2\n")
    hooks.watch(LEAF, hook)
    assert calls == []
    leaf = importlib.import_module(LEAF)
    assert calls == [(leaf, False, ["first", "last"])]


def test_called_before_an_importer_takes_a_name_out_of_it(stub: Write) -> None:
    stub(LEAF, "f = 'old'\n")
    stub("toy.b", f"from {LEAF} import f\n")
    hooks.watch(LEAF, lambda module, _: setattr(module, "f", "new"))
    assert importlib.import_module("toy.b").f == "new"


def test_a_module_that_is_there_is_given_and_calls_when_it_is_executed_again(
    load: Callable[..., ModuleType], hook: Hook, calls: Calls
) -> None:
    leaf = load(LEAF, "f = 1\n")
    assert hooks.watch(LEAF, hook) is leaf
    assert calls == []
    importlib.reload(leaf)
    assert calls == [(leaf, False, ["f"])]


def test_nothing_is_given_where_the_module_is_not_there(hook: Hook) -> None:
    assert hooks.watch(LEAF, hook) is None


def test_only_the_watched_module_calls(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF)
    stub("toy.a.other")
    hooks.watch(LEAF, hook)
    importlib.import_module("toy.a.other")
    assert calls == []


def test_a_package_can_be_watched_and_keeps_its_modules(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF)
    hooks.watch("toy.a", hook)
    importlib.import_module(LEAF)
    assert [module.__name__ for module, _, _ in calls] == ["toy.a"]


def test_armed_from_within_the_module_itself_it_waits_for_the_end(stub: Write, hook: Hook, calls: Calls) -> None:
    stub("toy_user")
    stub(LEAF, "import sys\nsys.modules['toy_arm'].arm()\nlast = 1\n")
    arming = ModuleType("toy_arm")
    arming.arm = lambda: hooks.watch(LEAF, hook)  # type: ignore[attr-defined] # called by the stub
    sys.modules["toy_arm"] = arming
    leaf = importlib.import_module(LEAF)
    importlib.import_module("toy_user")
    ((module, late, names),) = calls
    assert (module, late) == (leaf, True)
    assert "last" in names


def test_armed_in_a_circle_of_imports_it_waits_for_the_end(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF, "import toy.a.other\nlast = 1\n")
    stub("toy.a.other", "import sys, toy.a.leaf\nsys.modules['toy_arm'].arm()\nimport toy.a.third\n")
    stub("toy.a.third")
    arming = ModuleType("toy_arm")
    arming.arm = lambda: hooks.watch(LEAF, hook)  # type: ignore[attr-defined] # called by the stub
    sys.modules["toy_arm"] = arming
    importlib.import_module(LEAF)
    assert calls == []
    hooks.settle()
    ((_, late, names),) = calls
    assert late
    assert "last" in names


def test_a_module_that_failed_after_arming_itself_calls_on_the_retry(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF, "import sys\nsys.modules['toy_arm'].arm()\n")
    arming = ModuleType("toy_arm")
    arming.fail = True  # type: ignore[attr-defined] # read below

    def arm() -> None:
        hooks.watch(LEAF, hook)
        if arming.fail:
            raise RuntimeError("the first time")

    arming.arm = arm  # type: ignore[attr-defined] # called by the stub
    sys.modules["toy_arm"] = arming
    with pytest.raises(RuntimeError, match="the first time"):
        importlib.import_module(LEAF)
    arming.fail = False  # type: ignore[attr-defined] # read above
    leaf = importlib.import_module(LEAF)
    hooks.settle()
    assert {module for module, _, _ in calls} == {leaf}


def test_called_again_on_reload(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF, "f = 1\n")
    hooks.watch(LEAF, hook)
    leaf = importlib.import_module(LEAF)
    assert importlib.reload(leaf) is leaf
    assert [module for module, _, _ in calls] == [leaf, leaf]


def test_called_again_on_import_after_removal(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF, "f = 1\n")
    hooks.watch(LEAF, hook)
    first = importlib.import_module(LEAF)
    del sys.modules[LEAF]
    second = importlib.import_module(LEAF)
    assert [module for module, _, _ in calls] == [first, second]
    assert first is not second


def refuse(module: ModuleType, late: bool) -> None:
    raise RuntimeError("not like this")


def test_a_hook_that_raises_fails_the_import_each_time_in_strict_mode(
    stub: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULTRA_PATCHES", "strict")
    stub(LEAF)
    hooks.watch(LEAF, refuse)
    for _ in range(2):
        with pytest.raises(UltraPatchesError, match="not like this"):
            importlib.import_module(LEAF)
        assert LEAF not in sys.modules


def test_a_hook_that_raises_is_a_warning_else(stub: Write) -> None:
    stub(LEAF)
    hooks.watch(LEAF, refuse)
    guard.forget()
    with pytest.warns(UltraPatchesWarning, match=r"RuntimeError: not like this"):
        importlib.import_module(LEAF)


def test_a_module_that_fails_does_not_call(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF, "1 / 0\n")
    hooks.watch(LEAF, hook)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(LEAF)
    assert calls == []


def test_a_module_that_does_not_exist_is_missed_as_ever(stub: Write, hook: Hook) -> None:
    stub(LEAF)
    hooks.watch("toy.a.absent", hook)
    with pytest.raises(ModuleNotFoundError, match=r"toy\.a\.absent"):
        importlib.import_module("toy.a.absent")


def test_the_module_has_the_loader_it_would_have_had(stub: Write, hook: Hook) -> None:
    stub(LEAF, "def f():\n    return 1\n")
    hooks.watch(LEAF, hook)
    for leaf in (importlib.import_module(LEAF), importlib.reload(sys.modules[LEAF])):
        assert leaf.__spec__ is not None
        assert type(leaf.__spec__.loader) is importlib.machinery.SourceFileLoader
        assert leaf.__loader__ is leaf.__spec__.loader
        assert inspect.getsource(leaf.f) == "def f():\n    return 1\n"


def test_the_module_sees_its_own_loader_while_it_is_executed(stub: Write, hook: Hook) -> None:
    stub(LEAF, "loaders = type(__loader__).__name__, type(__spec__.loader).__name__\n")
    hooks.watch(LEAF, hook)
    assert importlib.import_module(LEAF).loaders == ("SourceFileLoader", "SourceFileLoader")


def test_looking_for_a_module_does_not_call(stub: Write, hook: Hook, calls: Calls) -> None:
    path = stub(LEAF, "f = 1\n")
    hooks.watch(LEAF, hook)
    spec = importlib.util.find_spec(LEAF)
    assert spec is not None
    assert (spec.origin, calls) == (str(path), [])


def test_two_threads_that_import_at_once_get_one_call(stub: Write) -> None:
    stub(LEAF, "import time\ntime.sleep(0.05)\nf = 'old'\n")
    calls: list[str] = []

    def set_slowly(module: ModuleType, late: bool) -> None:
        calls.append(threading.current_thread().name)
        threading.Event().wait(0.05)
        module.f = "new"  # type: ignore[attr-defined] # the stub's name

    hooks.watch(LEAF, set_slowly)
    seen: list[str] = []
    start = threading.Barrier(4)

    def import_it() -> None:
        start.wait()
        seen.append(importlib.import_module(LEAF).f)

    threads = [threading.Thread(target=import_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (seen, len(calls)) == (["new"] * 4, 1)


def test_unwatching_leaves_the_meta_path_as_it_was(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF)
    before = list(sys.meta_path)
    hooks.watch(LEAF, hook)
    assert len(sys.meta_path) == len(before) + 1
    hooks.watch("toy.b", hook)
    assert len(sys.meta_path) == len(before) + 1
    hooks.unwatch_all()
    assert sys.meta_path == before
    importlib.import_module(LEAF)
    assert calls == []


def test_a_finder_of_the_old_kind_is_passed_over(stub: Write, hook: Hook, calls: Calls) -> None:
    stub(LEAF)
    hooks.watch(LEAF, hook)
    old = SimpleNamespace(find_module=lambda name, path=None: None)
    sys.meta_path.insert(1, old)  # type: ignore[arg-type] # Python 3.10 and 3.11 still ask such finders
    leaf = importlib.import_module(LEAF)
    assert [module for module, _, _ in calls] == [leaf]
