"""Which patches may go: by verdicts alone, never by what is not measured, and never from under another patch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.core import lock as real_lock
from ultra_patches.core.lock import AFFECTED, UNAFFECTED, Lock
from ultra_patches.errors import UltraPatchesError
from ultra_patches.patch import Patch
from ultra_patches.report import retire
from ultra_patches.report.retire import Dependent, Retirement

from .stub import declare

ORDER = ("0.9.0", "0.10.0rc1", "0.10.0", "0.11.0")
BASE, TOP, ALONE = "base", "top", "alone"


def lock(verdicts: Mapping[str, Mapping[str, str]], order: tuple[str, ...] = ORDER) -> Lock:
    # Releases stand under several digests and in no order of versions.
    functions: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
        "vllm": {"m:f": {"one": order[::-2], "": order[-2::-2]}},
        "megatron-core": {"m:g": {"two": ("0.18.0",)}},
    }
    return Lock(functions, {}, verdicts)


def verdicts(**text: str) -> dict[str, dict[str, str]]:
    """One letter a release, oldest first: a for affected, u for unaffected, `-` for no verdict."""
    words = {"a": AFFECTED, "u": UNAFFECTED}
    return {
        name: {release: words[letter] for release, letter in zip(ORDER, letters, strict=True) if letter in words}
        for name, letters in text.items()
    }


def decided(
    measured: Mapping[str, Mapping[str, str]], *given_: str, needed_by: Mapping[str, list[Dependent]] | None = None
) -> dict[str, Retirement]:
    known = lock(measured)
    patches: dict[str, Patch] = {name: declare(name, ("vllm.m", "f")) for name in measured}
    return {row.id: row for row in retire.decide(patches, known, retire.supported(given_, known), needed_by or {})}


@pytest.mark.parametrize(
    ("letters", "given_", "may_go", "said"),
    [
        ("uuuu", (), True, "unaffected in 4 of 4 supported releases, vllm 0.9.0 to 0.11.0 (lock.json); first unaffected: 0.9.0"),
        ("aauu", (), False, "affected in 2 of 4 supported releases, vllm 0.9.0 to 0.10.0rc1; may go when support begins at vllm>=0.10.0"),
        ("aaaa", (), False, "affected in 4 of 4 supported releases, vllm 0.9.0 to 0.11.0; no end yet: 0.11.0, the newest, is affected"),
        ("aau-", (), False, "no end yet: 0.11.0, the newest, has no verdict; no verdict for 1 of 4 supported releases, vllm 0.11.0"),
        ("uu--", (), False, "no verdict for 2 of 4 supported releases, vllm 0.10.0 to 0.11.0: run `python -m compat run --upstream vllm`"),
        ("aauu", ("vllm>=0.10",), True, "unaffected in 2 of 2 supported releases, vllm 0.10.0 to 0.11.0 (lock.json); first unaffected: 0.10.0"),
        ("auuu", ("vllm>=0.11",), True, "vllm 0.11.0 (lock.json); first unaffected: 0.10.0rc1"),
        ("uuaa", ("vllm<0.10",), True, "vllm 0.9.0 (lock.json); first unaffected: 0.9.0"),
        ("aau-", ("vllm>=0.10",), False, "no verdict for 1 of 2 supported releases, vllm 0.11.0: run"),
    ],
)  # fmt: skip
def test_evidence(letters: str, given_: tuple[str, ...], may_go: bool, said: str) -> None:
    row = decided(verdicts(alone=letters), *given_)[ALONE]
    assert row.retirable is may_go
    assert said in row.evidence
    assert "\n" not in row.evidence


def test_a_verdict_of_another_word_is_none() -> None:
    assert not decided({ALONE: dict.fromkeys(ORDER, "fine")})[ALONE].retirable


def test_a_release_without_any_verdict_is_looked_at() -> None:
    assert decided({ALONE: {}})[ALONE].releases == ORDER


def test_an_empty_lock_lets_nothing_go() -> None:
    empty = Lock({}, {}, {})
    (row,) = retire.decide({ALONE: declare(ALONE, ("vllm.m", "f"))}, empty, retire.supported((), empty), {})
    assert (row.retirable, row.evidence) == (False, "lock.json knows no release of vllm: reinstall ultra-patches")


@pytest.mark.parametrize(
    ("given_", "releases"),
    [
        (("vllm>=0.10.0rc1",), ("0.10.0rc1", "0.10.0", "0.11.0")),
        (("vllm>=0.10",), ("0.10.0", "0.11.0")),
        (("vllm<0.11",), ("0.9.0", "0.10.0rc1", "0.10.0")),
        (("vllm<0.10",), ("0.9.0",)),  # by PEP 440 the candidates of 0.10 are not below it
        (("vllm!=0.10.0",), ("0.9.0", "0.10.0rc1", "0.11.0")),
        (("vllm>=0.10", "vllm<0.11"), ("0.10.0",)),
        (("vllm >= 0.10, < 0.11",), ("0.10.0",)),
        (("vLLM==0.10.*",), ("0.10.0rc1", "0.10.0")),
        (("vllm===0.9.0",), ("0.9.0",)),
        (("megatron_core>=0.18",), ORDER),
        ((), ORDER),
    ],
)
def test_supported(given_: tuple[str, ...], releases: tuple[str, ...]) -> None:
    assert retire.supported(given_, lock({}))["vllm"] == releases


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (("vlm>=0.9",), "--supported 'vlm>=0.9': no upstream is called 'vlm' (did you mean vllm?)"),
        (("torch>=2",), "no upstream is called 'torch' (known: megatron-core, vllm)"),
        (("vllm=>0.9",), "--supported 'vllm=>0.9' is no specifier: write for instance 'vllm>=0.26'"),
        (("vllm>=new",), "is no specifier"),
        (("vllm 0.9",), "is no specifier"),
        ((">=0.9",), "is no specifier"),
        (("",), "is no specifier"),
        (("vllm @ https://example.org/vllm.whl",), "is no specifier"),
        (("vllm[audio]>=0.9",), "is no specifier"),
        (("vllm>=0.9; python_version<'3'",), "is no specifier"),
        (("vllm",), "--supported 'vllm' names no releases: write for instance 'vllm>=0.11.0'"),
        (("vllm>=0.40",), "'vllm>=0.40' contains no release that was measured (vllm 0.9.0 to 0.11.0)"),
        (("vllm==0.10.0rc2",), "contains no release that was measured"),
        (("vllm>=0.10", "vllm<0.10"), "'vllm<0.10,>=0.10' contains no release that was measured"),
    ],
)
def test_input_that_means_nothing_is_one_line(given_: tuple[str, ...], said: str) -> None:
    with pytest.raises(UltraPatchesError) as caught:
        retire.supported(given_, lock({}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.one_of(st.text(max_size=20), st.text(max_size=12).map(lambda text: f"vllm{text}")))
def test_any_text_is_a_choice_or_one_line(text: str) -> None:
    try:
        chosen = retire.supported([text], lock({}))
    except UltraPatchesError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 # either outcome is right
    else:
        assert all(chosen.values())


NEEDS = {BASE: [Dependent(TOP, "requires it")]}


@pytest.mark.parametrize(
    ("base", "top", "go"),
    [("auuu", "aauu", set()), ("uuuu", "auuu", set()), ("auuu", "uuuu", {TOP}), ("uuuu", "uuuu", {BASE, TOP})],
)
def test_a_required_patch_goes_with_or_after_the_one_that_requires_it(base: str, top: str, go: set[str]) -> None:
    rows = decided(verdicts(base=base, top=top), needed_by=NEEDS)
    assert {row.id for row in rows.values() if row.retirable} == go
    assert (rows[BASE].with_or_after, rows[TOP].with_or_after) == ((TOP,), ())
    assert "; goes only with or after top (requires it)" in rows[BASE].evidence
    assert rows[BASE].evidence.endswith("cannot go yet") is (base == "uuuu" and TOP not in go)


def test_what_is_required_by_a_patch_that_is_not_measured_stays() -> None:
    assert not decided(verdicts(base="uuuu"), needed_by={BASE: [Dependent("foreign", "requires it")]})[BASE].retirable


def test_dependents_are_declared_or_import() -> None:
    patches = {
        name: declare(name, ("vllm.m", "f"), requires=(BASE,) if name == TOP else ()) for name in (BASE, TOP, ALONE)
    }
    sources = {
        BASE: "from ultra_patches.patches.basement import x",
        TOP: "import ultra_patches.patch",
        ALONE: "def f():\n    from ultra_patches.patches.base import build\n",
    }
    found = retire.dependents(patches, {BASE: "base", TOP: "top"}, sources)
    assert found == {BASE: [Dependent(TOP, "requires it"), Dependent(ALONE, "imports from its file")]}


MEASURED = st.fixed_dictionaries({name: st.text("au-", min_size=4, max_size=4) for name in (BASE, TOP, ALONE)})
LINKS = st.dictionaries(
    st.sampled_from([BASE, TOP, ALONE]),
    st.lists(st.sampled_from([BASE, TOP, ALONE]).map(lambda name: Dependent(name, "requires it")), max_size=2),
)
SPECIFIERS = st.sampled_from([(), ("vllm>=0.10",), ("vllm>=0.10.0rc1",), ("vllm<0.11",), ("vllm==0.11.0",)])


@given(MEASURED, LINKS, SPECIFIERS)
def test_what_may_go_is_unaffected_and_not_needed(
    letters: dict[str, str], links: dict[str, list[Dependent]], given_: tuple[str, ...]
) -> None:
    measured = verdicts(**letters)
    rows = decided(measured, *given_, needed_by=links)
    going = {row.id for row in rows.values() if row.retirable}
    clean = {n for n, row in rows.items() if all(measured[n].get(r) == UNAFFECTED for r in row.releases)}
    assert going <= clean
    for name in going:
        assert {d.id for d in links.get(name, [])} <= going
    for name in clean - going:
        assert {d.id for d in links.get(name, [])} - going, "something that stays keeps it"


@given(MEASURED, SPECIFIERS)
def test_less_support_never_keeps_a_patch(letters: dict[str, str], given_: tuple[str, ...]) -> None:
    whole, part = decided(verdicts(**letters)), decided(verdicts(**letters), *given_)
    assert all(part[name].retirable for name, row in whole.items() if row.retirable)


@pytest.mark.parametrize(
    ("letters", "last", "since"),
    [
        ("auau", 3, "0.11.0"),
        ("auuu", 3, "0.10.0rc1"),
        ("auua", 3, None),
        ("auua", 2, "0.10.0rc1"),
        ("u-uu", 3, "0.10.0"),
    ],
)
def test_unaffected_since(letters: str, last: int, since: str | None) -> None:
    assert retire.unaffected_since(verdicts(alone=letters)[ALONE], ORDER, last) == since


def test_mentions(tmp_path: Path) -> None:
    for path, text in {
        "tests/unit/test_a.py": "x = 'top-patch'\n\ny = top_patch\n",
        "tests/test_b.py": "x = 'top-patch-two', 'a-top-patch', top_patches\n",
        "compat/test_c.py": "from ultra_patches.patches.top_patch import PATCH\n",
        "compat/c.py": "top_patch\n",
        "tests/data.json": '"top-patch"\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert retire.mentions(tmp_path, "top-patch", "top_patch") == ("compat/test_c.py:1", "tests/unit/test_a.py:1,3")


def test_the_overlays_own_patches_and_where_they_are() -> None:
    root = Path(retire.__file__).parents[2]
    rows = retire.retire()
    points = {point.name: point.value for point in metadata.entry_points(group="ultra_patches.patches")}
    assert len(rows) >= 8
    for row in rows:
        assert [(root / path).is_file() for path in row.files] == [True], row
        assert row.entry_point is not None
        module = row.files[0].removesuffix(".py").replace("/", ".")
        assert points[row.entry_point] == f"{module}:PATCH"
        assert row.entry_point in (root / "pyproject.toml").read_text(encoding="utf-8")
        assert row.tests, "every patch has a test"
        assert json.loads(json.dumps(row.as_dict()))["id"] == row.id
    by_id = {row.id: row for row in rows}
    assert by_id["vllm-reload-numel-guard"].with_or_after == ("vllm-mamba-conv-weights",)
    assert by_id["megatron-router-bias-builder"].with_or_after == ("bridge-router-bias-unimodal",)


def test_of_what_is_locked_only_the_unaffected_goes() -> None:
    known = retire.releases(real_lock.load())
    for release in known["vllm"][::5]:
        for row in retire.retire([f"vllm=={release}"]):
            if row.upstream == "vllm" and row.retirable:
                assert real_lock.load().verdicts[row.id][release] == UNAFFECTED


def test_no_rich_and_no_upstream_is_imported() -> None:
    code = (
        "import sys; from ultra_patches.report.retire import retire; retire();"
        " print(sorted({'rich', 'torch', 'vllm', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
