"""Whatever goes wrong in a patch becomes a state: the user's import goes on, and nothing is left half-set."""

from __future__ import annotations

import pytest

from .site_dir import Site
from .stub import LAYERWISE, META

#: A patch of two functions in two modules; the second build raises.
SECOND_FAILS = f"""
def fail(original, module):
    raise ValueError("made for another vLLM")

toy = declare("toy", (META, "one"), ("{LAYERWISE}", "two", fail))
known("affected", toy)
"""
#: `user` would do harm without `base`.
REQUIRES = """
def fail(original, module):
    raise ValueError("made for another vLLM")

{base}
user = declare("user", {user}, requires=("base",))
known("affected", base, user)
"""


@pytest.fixture
def vllm(site: Site) -> Site:
    """A vLLM with one function in each of two modules, and both in a third."""
    site.write(META, "def one():\n    return 'upstream'\n")
    site.write(LAYERWISE, "def two():\n    return 'upstream'\n")
    site.write("vllm.both", "def one():\n    return 'upstream'\n\ndef two():\n    return 'upstream'\n")
    site.distribution("vllm", "0.20.0")
    return site


def test_a_build_that_raises_does_not_end_the_import(vllm: Site) -> None:
    vllm.declare(
        "def fail(*_):\n    raise ValueError('no')\n\n"
        "toy = declare('toy', (META, 'one', fail))\nknown('affected', toy)",
        "toy",
    )
    ended = vllm.run(f"import ultra_patches, {META} as meta\nreport([row('toy'), meta.one()])")
    assert (ended.value[0]["state"], ended.value[1]) == ("failed", "upstream")
    assert "ValueError: no" in ended.value[0]["reason"]
    assert ended.stderr.count("toy is failed") == 1


def test_the_second_of_two_targets_in_one_module_fails_and_the_first_is_put_back(vllm: Site) -> None:
    vllm.declare(
        "def fail(*_):\n    raise ValueError('no')\n\n"
        "toy = declare('toy', ('vllm.both', 'one'), ('vllm.both', 'two', fail))\nknown('affected', toy)",
        "toy",
    )
    row, values = vllm.ask("import ultra_patches, vllm.both as both\nreport([row('toy'), [both.one(), both.two()]])")
    assert (row["state"], values) == ("failed", ["upstream", "upstream"])


def test_the_second_of_two_modules_fails_and_the_first_is_put_back(vllm: Site) -> None:
    vllm.declare(SECOND_FAILS, "toy")
    between, row, values = vllm.ask(f"""
        import ultra_patches, {META} as meta
        between = row("toy")
        import {LAYERWISE} as layerwise
        report([between, row("toy"), [meta.one(), layerwise.two()]])
    """)
    assert between["state"] == "armed"
    assert between["reason"] == f"1 of 2 targets set, waiting for {LAYERWISE}"
    assert (row["state"], values) == ("failed", ["upstream", "upstream"])


def test_late_the_references_are_put_back_too(vllm: Site) -> None:
    vllm.declare(SECOND_FAILS, "toy")
    vllm.write("user", f"from {META} import one\n")
    row, values = vllm.ask(f"import user, {LAYERWISE}, ultra_patches\nreport([row('toy'), [user.one()]])")
    assert (row["state"], values) == ("failed", ["upstream"])


def test_what_was_replaced_meanwhile_does_not_end_the_import_either(vllm: Site) -> None:
    vllm.declare(SECOND_FAILS, "toy")
    state, value = vllm.ask(f"""
        import ultra_patches, {META} as meta
        meta.one = lambda: "theirs"
        import {LAYERWISE}
        report([row("toy")["state"], meta.one()])
    """)
    assert state in ("failed", "conflict")
    assert value == "theirs"


def test_a_conflict_in_the_second_module_puts_the_first_back(vllm: Site) -> None:
    vllm.declare(f"toy = declare('toy', (META, 'one'), ('{LAYERWISE}', 'two'))\nknown('affected', toy)", "toy")
    row, value = vllm.ask(f"""
        import {LAYERWISE} as layerwise
        layerwise.two = lambda: "theirs"
        import ultra_patches, {META} as meta
        report([row("toy"), meta.one()])
    """)
    assert (row["state"], value) == ("conflict", "upstream")


def test_a_failed_revert_leaves_the_patch_whole(vllm: Site) -> None:
    vllm.declare("toy = declare('toy', ('vllm.both', 'one'), ('vllm.both', 'two'))\nknown('affected', toy)", "toy")
    values = vllm.ask("""
        import ultra_patches, vllm.both as both
        both.one = lambda: "theirs"
        try:
            ultra_patches.revert("toy")
        except ultra_patches.UltraPatchesError:
            pass
        report([both.one(), both.two()])
    """)
    assert values == ["theirs", "corrected"]


def test_one_patch_that_fails_does_not_take_another_with_it(vllm: Site) -> None:
    vllm.declare(
        "def fail(*_):\n    raise ValueError('no')\n\n"
        "bad = declare('bad', ('vllm.both', 'one', fail))\n"
        "good = declare('good', ('vllm.both', 'two'))\nknown('affected', bad, good)",
        "bad",
        "good",
    )
    states = vllm.ask("import ultra_patches, vllm.both\nreport([row(i)['state'] for i in ('bad', 'good')])")
    assert states == ["failed", "applied"]


def requires(base: str, user: str) -> str:
    return REQUIRES.format(base=base, user=user)


def test_a_patch_is_set_after_the_one_that_it_needs(vllm: Site) -> None:
    vllm.declare(
        "ran = []\n\ndef note(original, module):\n    ran.append(original.__name__)\n    return lambda: 'corrected'\n\n"
        "a_user = declare('a-user', ('vllm.both', 'one', note), requires=('base',))\n"
        "base = declare('base', ('vllm.both', 'two', note))\nknown('affected', a_user, base)",
        "a-user",
        "base",
    )
    assert vllm.ask("import ultra_patches, vllm.both, declared\nreport(declared.ran)") == ["two", "one"]


def test_two_patches_of_one_function_are_both_applied(vllm: Site) -> None:
    vllm.declare(
        "def over(original, module):\n    return lambda: 'over ' + original()\n\n"
        "base = declare('base', (META, 'one'))\nuser = declare('user', (META, 'one', over), requires=('base',))\n"
        "known('affected', base, user)",
        "base",
        "user",
    )
    states, value = vllm.ask(
        f"import ultra_patches, {META} as meta\nreport([[row(i)['state'] for i in ('base', 'user')], meta.one()])"
    )
    assert (states, value) == (["applied", "applied"], "over corrected")


@pytest.mark.parametrize("user", ["(META, 'one')", "('vllm.both', 'one')"], ids=["same module", "later module"])
def test_a_patch_whose_need_failed_is_not_set(vllm: Site, user: str) -> None:
    vllm.declare(requires("base = declare('base', (META, 'one', fail))", user), "base", "user")
    row = vllm.ask(f"import ultra_patches, {META}, vllm.both\nreport(row('user'))")
    assert (row["state"], row["reason"]) == ("failed", "needs base, which is failed")


def test_a_patch_whose_need_fails_later_is_taken_back(vllm: Site) -> None:
    vllm.declare(requires("base = declare('base', (META, 'one', fail))", "('vllm.both', 'one')"), "base", "user")
    row, value = vllm.ask(f"import ultra_patches, vllm.both as both, {META}\nreport([row('user'), both.one()])")
    assert (row["state"], value) == ("failed", "upstream")


def test_a_chain_of_needs_is_followed_whatever_their_number(vllm: Site) -> None:
    """`last` needs one patch, and that one needs two: the order is not that of the counts."""
    vllm.declare(
        "def fail(*_):\n    raise ValueError('no')\n\n"
        "last = declare('last', ('vllm.both', 'two'), requires=('middle',))\n"
        "middle = declare('middle', ('vllm.both', 'one', fail), requires=('first', 'other'))\n"
        "first = declare('first', (META, 'one'))\nother = declare('other', (LAYERWISE, 'two'))\n"
        "known('affected', first, other, middle, last)",
        "first",
        "last",
        "middle",
        "other",
    )
    row, value = vllm.ask("import ultra_patches, vllm.both as both\nreport([row('last'), both.two()])")
    assert (row["state"], value) == ("failed", "upstream")


def test_a_need_that_is_disabled_disables(vllm: Site) -> None:
    vllm.declare(requires("base = declare('base', (META, 'one'))", "('vllm.both', 'one')"), "base", "user")
    row = vllm.ask("import ultra_patches, vllm.both\nreport(row('user'))", env={"ULTRA_PATCHES_DISABLE": "base"})
    assert (row["state"], row["reason"]) == ("disabled", "needs base, which is disabled")


def test_a_need_that_nobody_declares_is_told(vllm: Site) -> None:
    vllm.declare("user = declare('user', (META, 'one'), requires=('base',))\nknown('affected', user)", "user")
    row = vllm.ask(f"import ultra_patches, {META}\nreport(row('user'))")
    assert (row["state"], row["reason"]) == ("drifted", "needs base, which is not declared")


def test_needs_in_a_circle_do_not_break_the_status(vllm: Site) -> None:
    vllm.declare(
        "a = declare('a', (META, 'one'), requires=('b',))\nb = declare('b', ('vllm.both', 'one'), requires=('a',))\n"
        "known('affected', a, b)",
        "a",
        "b",
    )
    assert vllm.ask("import ultra_patches\nreport(row('a')['state'])") in ("armed", "drifted", "failed")


def test_reverting_a_patch_reverts_what_needs_it(vllm: Site) -> None:
    vllm.declare(requires("base = declare('base', (META, 'one'))", "('vllm.both', 'one')"), "base", "user")
    states, values = vllm.ask(f"""
        import ultra_patches, {META} as meta, vllm.both as both
        ultra_patches.revert("base")
        report([[row(i)["state"] for i in ("base", "user")], [meta.one(), both.one()]])
    """)
    assert (states, values) == (["reverted", "reverted"], ["upstream", "upstream"])


def test_what_needs_a_reverted_patch_is_not_set_later(vllm: Site) -> None:
    vllm.declare(requires("base = declare('base', (META, 'one'))", "('vllm.both', 'one')"), "base", "user")
    state, value = vllm.ask(f"""
        import ultra_patches, {META}
        ultra_patches.revert("base")
        import vllm.both as both
        report([row("user")["state"], both.one()])
    """)
    assert (state, value) == ("reverted", "upstream")


@pytest.mark.parametrize("call", ["require", "revert"])
def test_an_unknown_id_names_the_nearest(vllm: Site, call: str) -> None:
    vllm.declare("toy_patch = declare('toy-patch', (META, 'one'))", "toy-patch")
    error = vllm.ask(f"""
        import ultra_patches
        try:
            ultra_patches.{call}("toy-pach")
        except ultra_patches.UltraPatchesError as raised:
            report(str(raised))
    """)
    assert error == "no patch is called 'toy-pach' (did you mean toy-patch?)"


@pytest.mark.parametrize(
    ("verdict", "imports", "message"),
    [
        (
            "affected",
            "",
            f"toy is required but armed: same source as in 0.20.0, which is affected; import {META} first",
        ),
        ("affected", f"import {META}", None),
        ("unaffected", "", None),
    ],
)
def test_require(vllm: Site, verdict: str, imports: str, message: str | None) -> None:
    vllm.declare(f"toy = declare('toy', (META, 'one'))\nknown('{verdict}', toy)", "toy")
    error = vllm.ask(f"""
        import ultra_patches
        {imports}
        try:
            report(ultra_patches.require("toy"))
        except ultra_patches.UltraPatchesError as raised:
            report(str(raised))
    """)
    assert error == message
