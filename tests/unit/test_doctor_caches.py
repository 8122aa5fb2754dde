"""Which compile caches were made under another set of patches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ultra_patches.bias import compile_salt
from ultra_patches.report.doctor import caches as doctor_caches

ONE, TWO = frozenset({"one"}), frozenset({"one", "two"})


def cache(root: Path, name: str, config_hash: object, rank: str = "rank_0_0") -> Path:
    folder = root / "torch_compile_cache" / name
    (folder / rank / "backbone").mkdir(parents=True)
    (folder / rank / "backbone" / "cache_key_factors.json").write_text(json.dumps({"config_hash": config_hash}))
    return folder


def test_caches_of_this_patch_set_are_no_finding(tmp_path: Path) -> None:
    cache(tmp_path, "aa", "0123+one+two")
    assert list(doctor_caches.check_caches(tmp_path, TWO)) == []
    assert list(doctor_caches.check_caches(tmp_path / "none", TWO)) == []


@pytest.mark.parametrize(
    ("made", "said"),
    [("0123", "made with no patch"), ("0123+one", "made with one"), ("0123+two+x", "made with two, x")],
)
def test_one_of_another_set_is_named_with_what_to_type(tmp_path: Path, made: str, said: str) -> None:
    folder = cache(tmp_path, "aa", made)
    cache(tmp_path, "bb", "4567+two+one")
    (finding,) = doctor_caches.check_caches(tmp_path, TWO)
    assert finding.severity == "note"
    assert said in finding.what
    assert "here it is one, two" in finding.what
    assert finding.do.startswith(f"rm -r {folder} ")


def test_several_are_one_finding(tmp_path: Path) -> None:
    for name in ("aa", "bb"):
        for rank in ("rank_0_0", "rank_1_0"):
            cache(tmp_path, name, "0123+one", rank)
    (finding,) = doctor_caches.check_caches(tmp_path, frozenset())
    assert finding.what == "2 compile caches made with one; here it is no patch"


@pytest.mark.parametrize("broken", [7, None, ["x"]])
def test_what_cannot_be_read_is_passed_over(tmp_path: Path, broken: object) -> None:
    folder = cache(tmp_path, "aa", broken)
    next(folder.rglob("*.json")).with_name("other.json").write_text("{")
    assert list(compile_salt.caches(tmp_path)) == []


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"VLLM_CACHE_ROOT": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/vllm"),
        ({"VLLM_CACHE_ROOT": ""}, "~/.cache/vllm"),
    ],
)
def test_vllms_own_rule_says_where_they_are(environ: dict[str, str], root: str) -> None:
    assert doctor_caches.root_of(environ) == Path(root).expanduser()
