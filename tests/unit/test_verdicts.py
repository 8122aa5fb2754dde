"""A verdict that `verify` reached is kept for exactly the sources it was reached on; a broken cache costs only that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ultra_patches.core import verdicts
from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.patch import Patch, Verdict

from .site_dir import PROJECT, write_module
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


@pytest.mark.parametrize(("mode", "word"), [(0o777, "can be written by others"), (0o770, "can be written by others")])
def test_a_folder_that_others_can_write_is_ignored_with_a_word(toy: Patch, mode: int, word: str) -> None:
    verdicts.keep(toy, sources(), Verdict.CLEAN)
    path = verdicts.file_of(toy, sources())
    assert path is not None
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert verdicts.distrusted() is None
    path.parent.chmod(mode)
    assert verdicts.recall(toy, sources()) is None
    assert word in str(verdicts.distrusted())
    assert word in str(verdicts.keep(toy, sources(), Verdict.DEFECT))
    path.parent.chmod(0o755)
    assert verdicts.recall(toy, sources()) is Verdict.CLEAN


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_ignored_with_a_word(toy: Patch) -> None:
    verdicts.keep(toy, sources(), Verdict.CLEAN)
    path = verdicts.file_of(toy, sources())
    assert path is not None
    os.chown(path.parent, 54321, 54321)
    assert verdicts.recall(toy, sources()) is None
    assert "belongs to user 54321" in str(verdicts.distrusted())


def test_a_link_and_a_pipe_in_the_place_of_a_verdict_are_none(toy: Patch, tmp_path: Path) -> None:
    path = verdicts.file_of(toy, sources())
    assert path is not None
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert verdicts.recall(toy, sources()) is None
    path.unlink()
    (tmp_path / "elsewhere").write_text("clean")
    path.symlink_to(tmp_path / "elsewhere")
    assert verdicts.recall(toy, sources()) is None


def test_another_torch_has_no_verdict(toy: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for version in ("2.9.0+cpu", "2.9.0+cu130", "2.13.0+cu130"):
        write_module(tmp_path / version, "torch.version", f"__version__ = {version!r}\n")
        code = f"import sys; sys.path[:0] = [{str(tmp_path / version)!r}]\nfrom tests.unit.test_verdicts import *\n"
        code += "print(verdicts.name_of(declare('toy', ('vllm.meta', 'f')), sources()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
        names.add(done.stdout.split()[-1])
    assert len(names) == 3


def test_without_a_home_nothing_is_kept(toy: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    monkeypatch.setenv("HOME", "~")
    assert verdicts.folder() is None
    assert verdicts.recall(toy, sources()) is None
    assert "no home folder" in str(verdicts.keep(toy, sources(), Verdict.CLEAN))


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts.folder() == tmp_path / "cache" / "ultra-patches" / "verdicts"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.folder() == tmp_path / ".cache" / "ultra-patches" / "verdicts"
