"""Two patches of one function need a declared order; without one, nobody's is silently on top."""

from __future__ import annotations

import re

import pytest

from ultra_patches.core import discover
from ultra_patches.core.order import OURS, Clash, circles, clashes, in_order
from ultra_patches.patch import Patch, Target, Variant

from .site_dir import Site
from .stub import META, correct, declare

F, G, H = (META, "f"), (META, "g"), (META, "h")


def variant(*targets: tuple[str, str], **fields: bool) -> Variant:
    return Variant(
        "+".join(name for _, name in targets), tuple(Target(*target, correct, **fields) for target in targets)
    )


def pairs(*patches: Patch) -> list[tuple[str, str]]:
    return [clash.ids for clash in clashes(patches)]


def only(*patches: Patch) -> Clash:
    (clash,) = clashes(patches)
    return clash


def test_the_overlays_own_patches_have_an_order_wherever_they_share_a_function() -> None:
    own = tuple(patch for patch in discover.patches()[0].values() if patch.origin == OURS)
    assert len(own) > 20
    assert [clash.text for clash in clashes(own)] == []
    assert circles(own) == {}


def test_without_an_order_both_patches_and_their_functions_are_named() -> None:
    clash = only(declare("a", F, G), declare("b", G, F))
    assert (clash.ids, clash.keys, clash.left_out) == (("a", "b"), (f"{META}:f", f"{META}:g"), ("a", "b"))


@pytest.mark.parametrize("order", [{"over": ("a",)}, {"requires": ("a",)}])
def test_a_declared_order_is_one_in_either_direction(order: dict[str, tuple[str, ...]]) -> None:
    assert pairs(declare("a", F), declare("b", F, **order)) == []
    assert pairs(declare("b", F, **order), declare("a", F)) == []


def test_an_order_by_way_of_others_is_one() -> None:
    steps = (
        declare("a", F),
        declare("b", G, over=("a",)),
        declare("c", G, requires=("b",)),
        declare("d", F, over=("c",)),
    )
    assert pairs(*steps) == []
    assert pairs(steps[0], steps[3]) == [("a", "d")], "by way of patches that are not there is none"


def test_patches_of_different_functions_need_no_order() -> None:
    assert pairs(declare("a", F), declare("b", G), declare("c", (META, "A.f"))) == []


def test_only_variants_that_one_release_can_have_count() -> None:
    """Where `g` exists, `a` takes its first variant: it never replaces `f` beside `b`, which needs `g`."""
    two = declare("a", variants=(variant(G), variant(F))), declare("b", variants=(variant(F, G),))
    assert only(*two).keys == only(*reversed(two)).keys == (f"{META}:g",)
    other = declare("b", variants=(variant(F, H),))
    assert only(two[0], other).keys == (f"{META}:f",)


def test_an_optional_target_needs_an_order_too() -> None:
    optional = Variant("all", (Target(*F, correct), Target(*G, correct, optional=True)))
    assert pairs(declare("a", variants=(optional,)), declare("b", G)) == [("a", "b")]


@pytest.mark.parametrize(("first", "second", "found"), [(True, True, 0), (True, False, 1), (False, False, 1)])
def test_targets_that_both_commute_need_no_order(first: bool, second: bool, found: int) -> None:
    made = [
        declare(name, variants=(variant(F, commutes=commutes),)) for name, commutes in (("a", first), ("b", second))
    ]
    assert len(pairs(*made)) == found


@pytest.mark.parametrize("place", [0, 1])
def test_beside_one_of_the_overlays_own_the_other_is_left_out_and_told_what_to_write(place: int) -> None:
    patches = [declare("theirs", F)]
    patches.insert(place, declare("ours", F, origin=OURS))
    clash = only(*patches)
    assert clash.left_out == ("theirs",)
    assert clash.text.endswith('so that theirs is not set: write over=("ours",) in theirs')
    assert only(*(declare(name, F, origin=OURS) for name in "ab")).left_out == ()


def test_over_one_another_is_no_order() -> None:
    patches = declare("a", F, over=("b",)), declare("b", F, over=("a",)), declare("c", G, over=("a",))
    clash = only(*patches)
    assert clash.ids == ("a", "b")
    assert "each is declared over the other" in clash.text
    ((ids, text),) = circles(patches).items()
    assert ids == {"a", "b"}
    assert re.search(r"a \(.*\), b \(.*\): declared over or needing one another in a circle", text)
    assert set(circles((declare("a", F, over=("a",)),))) == {frozenset("a")}


def test_each_patch_comes_once_and_after_those_below_it_also_in_long_chains() -> None:
    names = [f"p{number:03}" for number in range(60)]
    chain = [declare(name, F, over=tuple(names[:number])) for number, name in enumerate(names)]
    assert list(in_order({patch.id: patch for patch in reversed(chain)})) == names


SECOND_FILE = "from unit.stub import *\n\ndef probe():\n    return inconclusive()\n"


@pytest.fixture
def vllm(site: Site) -> Site:
    site.write(META, "def f():\n    return 'upstream'\n")
    site.write("acme", SECOND_FILE)
    site.distribution("vllm", "0.26.0")
    return site


def two(vllm: Site, first: str = "", second: str = "", verdicts: str = "known('affected', a, b)") -> None:
    vllm.declare(
        "import acme\n"
        f"a = declare('a', (META, 'f'), {first})\nb = declare('b', (META, 'f'), probe=acme.probe, {second})\n{verdicts}",
        "a",
        "b",
    )


ASK = f"import ultra_patches, {META} as meta\nreport([[row(i)['state'] for i in 'ab'], row('b')['reason'], meta.f()])"


def test_neither_of_two_is_set_and_both_files_are_named(vllm: Site) -> None:
    two(vllm)
    ended = vllm.run(ASK)
    states, reason, value = ended.value
    assert (states, value) == (["conflict", "conflict"], "upstream")
    files = f"b ({vllm.root}/acme.py)", f"{META}:f, and neither is declared over the other"
    for text in (reason, ended.stderr):
        assert all(part in text for part in files)
        assert 'write over=("b",) in a or over=("a",) in b' in text


def test_the_complaint_comes_at_arming_and_ends_a_strict_import(vllm: Site) -> None:
    two(vllm)
    assert "both replace" in vllm.run("import ultra_patches").stderr
    ended = vllm.start("-c", "import ultra_patches", env={"ULTRA_PATCHES": "strict"})
    assert ended.code == 1
    assert "UltraPatchesError: a (" in ended.stderr


def test_late_neither_is_set(vllm: Site) -> None:
    two(vllm)
    assert vllm.ask(f"import {META}\n{ASK}")[::2] == [["conflict", "conflict"], "upstream"]


def test_the_overlays_own_stays(vllm: Site) -> None:
    two(vllm, "origin='ultra-patches'", verdicts="known('affected', a, b)")
    ended = vllm.run(ASK)
    assert ended.value[::2] == [["applied", "conflict"], "corrected"]
    assert 'so that b is not set: write over=("a",) in b' in ended.stderr


@pytest.mark.parametrize(
    ("remedy", "states"),
    [("a", ["disabled", "applied"]), ("b", ["applied", "disabled"])],
    ids=["without a", "without b"],
)
def test_one_alone_is_set_where_the_other_is_disabled(vllm: Site, remedy: str, states: list[str]) -> None:
    two(vllm)
    ended = vllm.run(ASK, env={"ULTRA_PATCHES_DISABLE": remedy})
    assert (ended.value[0], ended.stderr) == (states, "")


def test_one_alone_is_set_where_the_other_is_not_needed(vllm: Site) -> None:
    """The declarations are wrong all the same, so that it is said."""
    two(vllm, verdicts="known('affected', a)\nknown('unaffected', b)")
    ended = vllm.run(ASK)
    assert ended.value[0] == ["applied", "not-needed"]
    assert "both replace" in ended.stderr


def test_what_needs_one_of_them_is_not_set_either(vllm: Site) -> None:
    vllm.write("vllm.user", "def g():\n    return 'upstream'\n")
    vllm.declare(
        "a = declare('a', (META, 'f'))\nb = declare('b', (META, 'f'))\n"
        "user = declare('user', ('vllm.user', 'g'), requires=('a',))\nknown('affected', a, b, user)",
        *("a", "b", "user"),
    )
    row = vllm.ask("import ultra_patches, vllm.user\nreport(row('user'))")
    assert (row["state"], row["reason"]) == ("conflict", "needs a, which is conflict")


def test_a_circle_is_said_once_and_neither_is_set(vllm: Site) -> None:
    two(vllm, "over=('b',)", "over=('a',)")
    ended = vllm.run(ASK)
    assert ended.value[::2] == [["conflict", "conflict"], "upstream"]
    assert ended.stderr.count("in a circle, so that no order is right") == 1
