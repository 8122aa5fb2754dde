"""A verdict that `verify` reached is kept for exactly the sources it was reached on; a broken cache costs only that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ultra_patches.core import verdicts
from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.patch import Patch, Verdict

from .stub import declare

KEY = "vllm.meta:f"


def sources(digest: str = "one", key: str = KEY) -> Mapping[str, Fingerprint]:
    return {key: Fingerprint(digest, "(a)", False)}


@pytest.fixture
def toy() -> Patch:
    return declare("toy", ("vllm.meta", "f"))


@pytest.mark.parametrize("verdict", [Verdict.DEFECT, Verdict.CLEAN])
def test_kept_and_recalled(toy: Patch, verdict: Verdict) -> None:
    assert verdicts.keep(toy, sources(), verdict) is None
    assert verdicts.recall(toy, sources()) is verdict


def test_nothing_is_kept_at_first(toy: Patch) -> None:
    assert verdicts.recall(toy, sources()) is None


def test_the_last_verdict_counts(toy: Patch) -> None:
    verdicts.keep(toy, sources(), Verdict.DEFECT)
    verdicts.keep(toy, sources(), Verdict.CLEAN)
    assert verdicts.recall(toy, sources()) is Verdict.CLEAN


@pytest.mark.parametrize(
    "other",
    [sources("two"), {}, sources("one", "vllm.meta:g")],
    ids=["changed", "gone", "moved"],
)
def test_other_sources_have_no_verdict(toy: Patch, other: Mapping[str, Fingerprint]) -> None:
    verdicts.keep(toy, sources(), Verdict.DEFECT)
    assert verdicts.recall(toy, other) is None


@pytest.mark.parametrize(
    "other",
    [
        declare("other", ("vllm.meta", "f")),
        declare("toy", ("vllm.meta", "f"), last_checked="2026-02-02"),
        declare("toy", ("vllm.meta", "f"), watches=("vllm.meta:g",)),
    ],
    ids=["another patch", "a later check", "another watched function"],
)
def test_another_patch_has_no_verdict(toy: Patch, other: Patch) -> None:
    verdicts.keep(toy, sources(), Verdict.DEFECT)
    assert verdicts.recall(other, sources()) is None


def test_two_verdicts_stand_side_by_side(toy: Patch) -> None:
    verdicts.keep(toy, sources("one"), Verdict.DEFECT)
    verdicts.keep(toy, sources("two"), Verdict.CLEAN)
    assert verdicts.recall(toy, sources("one")) is Verdict.DEFECT
    assert verdicts.recall(toy, sources("two")) is Verdict.CLEAN


def test_an_inconclusive_verdict_is_not_recalled(toy: Patch) -> None:
    verdicts.keep(toy, sources(), Verdict.INCONCLUSIVE)
    assert verdicts.recall(toy, sources()) is None


@pytest.mark.parametrize(
    "content", [b"", b"defec", b"inconclusive", b"\xff\xfe", b'{"a": 1}'], ids=lambda c: str(c[:8])
)
def test_a_corrupt_verdict_is_none_and_is_written_anew(toy: Patch, content: bytes) -> None:
    path = verdicts.file_of(toy, sources())
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert verdicts.recall(toy, sources()) is None
    assert verdicts.keep(toy, sources(), Verdict.DEFECT) is None
    assert verdicts.recall(toy, sources()) is Verdict.DEFECT


def test_a_cache_that_cannot_be_written_is_one_line(
    toy: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    line = verdicts.keep(toy, sources(), Verdict.DEFECT)
    assert line is not None
    assert line.startswith("the verdict on toy cannot be kept in ")
    assert "set XDG_CACHE_HOME" in line
    assert "\n" not in line
    assert verdicts.recall(toy, sources()) is None


def test_a_folder_in_the_place_of_the_file_is_one_line_and_nothing_is_left(toy: Patch) -> None:
    path = verdicts.file_of(toy, sources())
    path.mkdir(parents=True)
    assert "cannot be kept" in str(verdicts.keep(toy, sources(), Verdict.DEFECT))
    assert list(path.parent.iterdir()) == [path]


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts.folder() == tmp_path / "cache" / "ultra-patches" / "verdicts"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.folder() == tmp_path / ".cache" / "ultra-patches" / "verdicts"
