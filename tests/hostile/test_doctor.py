"""`doctor` and `retire` on metadata, caches and files that may be anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.site_dir import Site
from ultra_patches.report import retire
from ultra_patches.report.doctor import facts

LIBRARIES = ("packaging", "rich", "markdown_it", "mdurl", "pygments")
RECORDS = {
    "not UTF-8": b"vllm/__init__.py,sha256=\xff,1\n",
    "a giant field": b"vllm/__init__.py,sha256=" + b"a" * 300_000 + b",1\n",
    "null characters": b"\0,\0,\0\n",
    "an open quote": b'"vllm/__init__.py\n' * 10_000,
}
DIRECT_URLS = {
    "not UTF-8": b"\xff",
    "deep": b"[" * 200_000,
    "a null character": b'{"url": "file:///a%00b", "dir_info": {"editable": true}}',
    "no URL": b'{"url": [], "dir_info": {"editable": true}}',
    "no host": b'{"url": "http://[", "dir_info": {"editable": true}}',
    "wrong types": b'{"dir_info": 7}',
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "site", tmp_path)
    made.library(*LIBRARIES)
    made.write("vllm.config.vllm")
    return made


@pytest.mark.parametrize(
    ("name", "content"),
    [*(("RECORD", text) for text in RECORDS.values()), *(("direct_url.json", text) for text in DIRECT_URLS.values())],
    ids=[*(f"RECORD {name}" for name in RECORDS), *(f"direct_url {name}" for name in DIRECT_URLS)],
)
def test_metadata_of_an_upstream(site: Site, name: str, content: bytes) -> None:
    (site.distribution("vllm", "0.26.0") / name).write_bytes(content)
    ended = site.start("-m", "ultra_patches", "doctor", "--json")
    assert (ended.code in (0, 1), ended.stderr) == (True, ""), ended.stderr
    assert json.loads(ended.stdout)["upstreams"][0]["version"] == "0.26.0"


def test_one_distribution_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "site", tmp_path)
    site.distribution("a-broken", entry_points="[g]\n")
    (site.root / "a_broken-1.0.dist-info" / "entry_points.txt").write_bytes(b"[g]\n\xff = x:y\n")
    site.distribution("whole", entry_points="[g]\nfound = a:b\n")
    monkeypatch.syspath_prepend(site.root)
    assert ("g", "found", "a:b") in facts.entry_points()
    (broken,) = facts.installed("a-broken")
    assert broken.points == frozenset()


def test_compile_caches_that_are_none(site: Site, tmp_path: Path) -> None:
    site.distribution("vllm", "0.26.0")
    for number in range(5):
        folder = tmp_path / "vllm-cache" / "torch_compile_cache" / f"hash{number}" / "rank_0_0" / "backbone"
        folder.mkdir(parents=True)
        path = folder / "cache_key_factors.json"
        if number == 0:
            os.mkfifo(path)
        elif number == 1:
            path.symlink_to("/dev/zero")
        elif number == 2:
            with path.open("wb") as file:
                file.truncate(1 << 42)
        else:
            path.write_text("[" * 200_000 if number == 3 else json.dumps({"config_hash": ["x"]}))
    ended = site.start("-m", "ultra_patches", "doctor", env={"VLLM_CACHE_ROOT": str(tmp_path / "vllm-cache")})
    assert (ended.code in (0, 1), ended.stderr) == (True, "")


def test_tests_of_a_checkout_that_are_no_files(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_bytes(b"\xff\n'vllm-toy'\n")
    os.mkfifo(tests / "test_b.py")
    (tests / "test_c.py").symlink_to("/dev/zero")
    (tests / "test_d.py").symlink_to("nothing")
    (tests / "test_e.py").mkdir()
    assert retire.mentions(tmp_path, "vllm-toy", "vllm_toy") == ("tests/test_a.py:2",)
