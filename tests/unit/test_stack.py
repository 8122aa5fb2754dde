"""Patches over one another in one function: the declared order, taking one from under the others, and coming late."""

from __future__ import annotations

import itertools

import pytest

from .site_dir import Site
from .stub import META

#: Three that each add their letter to what the one below gives; `c` is declared over `b`, `b` over `a`.
STACKED = """
def adds(letter):
    def build(original, module):
        def f():
            return original() + letter
        return f
    return build

def optional(letter):
    return Target("vllm.extra", "g", adds(letter), optional=True)

c = declare("c", (META, "f", adds("c")), over=("b",))
b = declare("b", (META, "f", adds("b")), over=("a",))
a = declare("a", (META, "f", adds("a")))
known("affected", a, b, c)
"""


@pytest.fixture
def vllm(site: Site) -> Site:
    site.write(META, "def f():\n    return '-'\n")
    site.write("vllm.user", f"from {META} import f\n")
    site.distribution("vllm", "0.26.0")
    site.declare(STACKED, "a", "b", "c")
    return site


def test_the_declared_order_is_kept_whatever_the_names(vllm: Site) -> None:
    assert vllm.ask(f"import ultra_patches, {META} as meta\nreport(meta.f())") == "-abc"


def test_all_are_in_force_and_rebound_where_they_come_late(vllm: Site) -> None:
    value, states = vllm.ask("""
        import vllm.user, ultra_patches
        report([vllm.user.f(), [row(name)["state"] for name in "abc"]])
    """)
    assert (value, states) == ("-abc", ["applied-late"] * 3)


@pytest.mark.parametrize("gone", ["a", "b", "c", *map("".join, itertools.permutations("abc", 2)), "abc", "bca"])
def test_any_can_be_taken_from_under_the_others(vllm: Site, gone: str) -> None:
    left = "".join(name for name in "abc" if name not in gone)
    values, states = vllm.ask(f"""
        import ultra_patches, vllm.user, {META} as meta
        for name in {gone!r}:
            ultra_patches.revert(name)
        report([[meta.f(), vllm.user.f()], {{name: row(name)["state"] for name in "abc"}}])
    """)
    assert values == [f"-{left}"] * 2, "every binding is the same function"
    assert states == {name: "reverted" if name in gone else "applied" for name in "abc"}


@pytest.mark.parametrize("off", ["a", "b", "c", "a,b", "a,c", "b,c"])
def test_any_can_be_turned_off_alone(vllm: Site, off: str) -> None:
    code = f"import ultra_patches, {META} as meta\nreport(meta.f())"
    left = "".join(name for name in "abc" if name not in off)
    assert vllm.ask(code, env={"ULTRA_PATCHES_DISABLE": off}) == f"-{left}"


def test_one_that_is_set_later_goes_under_those_that_come_over_it(vllm: Site) -> None:
    assert vllm.ask(f"""
        import os
        os.environ["ULTRA_PATCHES_DISABLE"] = "a"
        import ultra_patches, vllm.user, {META} as meta
        before = meta.f()
        del os.environ["ULTRA_PATCHES_DISABLE"]
        from ultra_patches.core import overlay
        overlay.arm()
        report([before, meta.f(), vllm.user.f(), [row(name)["state"] for name in "abc"]])
    """) == ["-bc", "-abc", "-abc", ["applied-late", "applied", "applied"]]


def test_a_module_that_is_executed_again_gets_them_all_again(vllm: Site) -> None:
    assert vllm.ask(f"""
        import importlib, ultra_patches, {META} as meta
        importlib.reload(meta)
        values = [meta.f()]
        ultra_patches.revert("b")
        report([*values, meta.f()])
    """) == ["-abc", "-ac"]


def test_a_thousand_arms_and_reverts_leave_the_process_as_it_was(vllm: Site) -> None:
    seen = vllm.ask(f"""
        import gc, sys
        import {META} as meta, vllm.user
        original = meta.f
        import ultra_patches
        from ultra_patches.core import overlay
        overlay.disarm()
        def look():
            gc.collect()
            return [len(sys.meta_path), len(sys.modules), len(gc.get_objects())]
        for _ in range(3):
            overlay.arm()
            overlay.disarm()
        before = look()
        for number in range(1000):
            overlay.arm()
            assert meta.f() == vllm.user.f() == "-abc", number
            if number % 2:
                for name in "bca":
                    ultra_patches.revert(name)
            overlay.disarm()
            assert meta.f is vllm.user.f is original, number
        after = look()
        report([before, after, vars(original), [hasattr(original, "__wrapped__")]])
    """)
    before, after, attributes, wrapped = seen
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 1000, "less than an object a round is left"
    assert (attributes, wrapped) == ({}, [False])


OPTIONAL = """
def marks(original, module):
    def f():
        return original() + "!"
    return f

toy = declare("toy", (META, "f", marks), variants=(
    Variant("all", (
        Target(META, "f", marks),
        Target("vllm.engine", "receive", marks, optional=True),
        Target("vllm.gone", "receive", marks, optional=True),
    )),
))
"""


@pytest.mark.parametrize("verdict", ["known('affected', toy)", "pass"], ids=["known", "probed"])
def test_what_is_optional_is_not_waited_for_and_is_set_when_it_comes(site: Site, verdict: str) -> None:
    site.write(META, "def f():\n    return '-'\n")
    site.write("vllm.engine", "def receive():\n    return '='\n")
    site.distribution("vllm", "0.26.0")
    defect = "probe=lambda: Finding(Verdict.DEFECT, 'seen'), probe_after=(META,), "
    site.declare(OPTIONAL.replace('"toy", ', '"toy", ', 1).replace("variants=", defect + "variants=") + verdict, "toy")
    states = site.ask(f"""
        import ultra_patches, {META} as meta
        first = [row("toy")["state"], meta.f()]
        ultra_patches.require("toy")
        import vllm.engine as engine
        second = [row("toy")["state"], engine.receive()]
        ultra_patches.revert("toy")
        report([first, second, [meta.f(), engine.receive()]])
    """)
    assert states == [["applied", "-!"], ["applied", "=!"], ["-", "="]]
