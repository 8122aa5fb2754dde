"""What a release, a download or a kept result can have wrong with it: named in one line, and nothing overwritten.

The broken ones come over real HTTP from an index on this machine; `python -m compat` runs in a copy of the project.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compat import fetch, matrix, results
from compat.matrix import Cell
from compat.test_new import META, Index, sdist, serving, wheel

CELL = Cell("vllm", "0.22.1")
LAYERWISE = "vllm/model_executor/model_loader/reload/layerwise.py"
WHEEL, SDIST = "vllm-0.22.1-py3-none-any.whl", "vllm-0.22.1.tar.gz"
MATRIX = '[vllm]\nreleases = ["0.22.1"]\nlowest = "0.22.1"\nboundary = []\nlatest = "0.22.1"\nnot_live = {}\n'
EMPTY_LOCK = '{"format": 1, "functions": {}, "signatures": {}, "verdicts": {}}'


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with serving(tmp_path / "cache") as made:
        yield made


def refused(action: Callable[[], object]) -> str:
    """The one line with which something cannot be had."""
    with pytest.raises(fetch.FetchError) as caught:
        action()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def kept() -> list[Path]:
    return [path for path in fetch.cache().rglob("*") if path.is_file()]


def test_a_release_that_does_not_exist_or_has_no_such_file(index: Index) -> None:
    index.add(WHEEL, wheel({META: ""}))
    said = "vllm 9.9.9 does not exist in the package index (the newest is 0.22.1)"
    assert refused(lambda: fetch.files("vllm", "9.9.9", [META])) == said
    assert refused(lambda: fetch.tree("vllm", "9.9.9")) == said
    assert refused(lambda: fetch.tree("vllm", "0.22.1")).startswith("vllm 0.22.1 has no sdist for this machine")
    index.add("vllm-0.22.1-cp39-cp39-win_arm64.whl", index.files.pop(WHEEL).content)
    fetch.packages.cache_clear()
    assert refused(lambda: fetch.files("vllm", "0.22.1", [META])).startswith(
        "vllm 0.22.1 has no wheel for this machine"
    )
    assert kept() == []


@pytest.mark.parametrize(("reason", "said"), [("wrong version", "wrong version"), ("", "no reason given")])
def test_a_yanked_release(index: Index, reason: str, said: str) -> None:
    index.add(WHEEL, wheel({META: ""}), yanked=reason)
    index.add(SDIST, sdist({META: ""}), yanked=reason)
    assert refused(lambda: fetch.files("vllm", "0.22.1", [META])) == f"vllm 0.22.1 was yanked: {said}"
    assert refused(lambda: fetch.tree("vllm", "0.22.1")) == f"vllm 0.22.1 was yanked: {said}"
    assert kept() == []


@pytest.mark.parametrize(
    ("kind", "page", "said"),
    [
        ("", b"", "the package index has no project vllm"),
        ("text/html", b"<html></html>", "vllm 0.22.1 does not exist in the package index (the newest is none)"),
        ("text/plain", b"hello", "/ is no package index (UnsupportedContentTypeError): check UV_DEFAULT_INDEX"),
        ("application/vnd.pypi.simple.v1+json", b"{", "the package index cannot be read (JSONDecodeError): check the network"),
        ("application/vnd.pypi.simple.v1+json", b"{}", "/ is no package index (ValidationError): check UV_DEFAULT_INDEX"),
    ],
    ids=["no project", "no files", "no index", "no JSON", "other JSON"],
)  # fmt: skip
def test_what_is_no_index_of_releases(index: Index, kind: str, page: bytes, said: str) -> None:
    index.pages.update({"vllm": (kind, page)} if kind else {})
    assert refused(lambda: fetch.tree("vllm", "0.22.1")).endswith(said)


@pytest.mark.usefixtures("index")
def test_an_index_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple/")
    said = "the package index cannot be read (ConnectionError): check the network"
    assert refused(lambda: fetch.packages("vllm")) == said


def test_a_wheel_without_the_file(index: Index) -> None:
    index.add(WHEEL, wheel({META: "def f():\n    pass\n"}))
    for _ in "twice":  # the second time from the cache
        got = fetch.files("vllm", "0.22.1", [META, LAYERWISE])
        assert got == {META: "def f():\n    pass\n", LAYERWISE: None}


def test_only_the_parts_that_are_asked_for_are_read(index: Index) -> None:
    index.add(WHEEL, wheel({"vllm/_C.so": os.urandom(3_000_000), META: "x = 1\n"}, zipfile.ZIP_STORED))
    assert fetch.files("vllm", "0.22.1", [META]) == {META: "x = 1\n"}
    assert index.sent < 200_000


def test_an_index_without_range_requests_sends_the_whole_wheel(index: Index) -> None:
    index.ranges = False
    index.add(WHEEL, wheel({META: "x = 1\n"}))
    assert fetch.files("vllm", "0.22.1", [META, LAYERWISE]) == {META: "x = 1\n", LAYERWISE: None}
    shutil.rmtree(fetch.cache())
    index.files[WHEEL].digest = "0" * 64
    fetch.packages.cache_clear()
    assert f"{WHEEL} arrived with SHA-256" in refused(lambda: fetch.files("vllm", "0.22.1", [META]))
    assert kept() == []


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("at", ["member", "directory", "end", "cut"])
def test_a_garbled_wheel(index: Index, at: str, ranges: bool) -> None:
    index.ranges = ranges
    content = wheel({META: "".join(f"x{i} = {i * i}\n" for i in range(500))})
    place = {"member": 200, "directory": content.rindex(b"PK\x01\x02"), "end": len(content) - 20, "cut": 900}[at]
    garbled = bytes(byte ^ 0xFF for byte in content[place : place + 20])
    index.add(WHEEL, content[:place] + (b"" if at == "cut" else garbled + content[place + 20 :]), digest=None)
    assert refused(lambda: fetch.files("vllm", "0.22.1", [META])).startswith(WHEEL)
    assert kept() == []


@pytest.mark.parametrize("digest", ["0" * 64, "", None], ids=["wrong hash", "right hash", "no hash"])
@pytest.mark.parametrize("cut", ["no", "on the way", "at the source"])
def test_a_broken_source_distribution(index: Index, digest: str | None, cut: str) -> None:
    content = sdist({META: "".join(f"x{i} = {i * i}\n" for i in range(500))})
    half = len(content) // 2
    if cut == "at the source":
        content = content[:half]
    index.add(SDIST, content, digest=digest, cut=half if cut == "on the way" else 0)
    if cut == "no" and digest != "0" * 64:
        assert (fetch.tree("vllm", "0.22.1") / META).read_text(encoding="utf-8").startswith("x0 = 0\n")
        return
    assert refused(lambda: fetch.tree("vllm", "0.22.1")).startswith(SDIST)
    assert not list(fetch.cache().glob("*"))


@dataclass(frozen=True)
class Copy:
    """A copy of the project whose matrix has one release, with a lock and a result that nothing may overwrite."""

    root: Path
    result: Path

    def write_result(self, patch_set: str = "", cell: Cell = CELL) -> None:
        clean = {"verdict": "clean"}
        runs = {"without": {"verdict": "defect"}, "alone": clean, "together": clean}
        rows = {**runs, "verdict": "corrected", "note": ""}
        patches = {patch.id: rows for patch in matrix.patches_of("vllm")}
        digest = patch_set or results.patch_set_digest(cell.upstream)
        made = results.Result(cell.upstream, cell.release, "2026-01-01", "3.12.0", "2.13.0", digest, 1.0, patches)
        with self.kept_there():
            results.save(CELL, made)

    @contextlib.contextmanager
    def kept_there(self) -> Iterator[None]:
        """Results are those of the copy, in this process too."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(results, "FOLDER", self.result.parent)
            yield

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        names = ("PATH", "HOME", "UV_DEFAULT_INDEX", "XDG_CACHE_HOME", "NO_PROXY")
        env = {**{name: os.environ[name] for name in names if name in os.environ}, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "compat", *arguments]
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=120, check=False)

    def refuses(self, *arguments: str, code: int = 1) -> str:
        """The one line with which a command fails, everything as it was."""
        before = self.files()
        done = self.start(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert self.files() == before
        # What is left besides is the progress bar, which ends in a number of a number.
        said = [line for line in done.stderr.splitlines() if line.strip() and "━" not in line]
        assert len(said) == 1, done.stderr
        return said[0]


@pytest.fixture
def project(tmp_path: Path, index: Index) -> Copy:
    root = tmp_path / "project"
    for folder in ("compat", "ultra_patches"):
        ignore = shutil.ignore_patterns("__pycache__", "results", "lock.json")
        shutil.copytree(matrix.ROOT.parent / folder, root / folder, ignore=ignore)
    (root / "compat" / "matrix.toml").write_text(MATRIX, encoding="utf-8")
    (root / "ultra_patches" / "core" / "lock.json").write_text(EMPTY_LOCK, encoding="utf-8")
    copy = Copy(root, root / "compat" / "results" / f"{CELL.name}.json")
    copy.write_result()
    index.add(WHEEL, wheel({META: "def get_numel_loaded(weight_loader, args):\n    return 0, None\n"}))
    return copy


def test_the_copy_is_what_runs(project: Copy) -> None:
    """Else everything below would pass, or overwrite the lock of the project itself."""
    before = project.files()
    assert project.start("run", "--cell", CELL.name).returncode == 0, "its result is of this patch set"
    assert project.files() == before
    assert project.start("scan").returncode == 1
    done = project.start("scan", "--write")
    assert done.returncode == 0, done.stderr
    locked = json.loads((project.root / "ultra_patches" / "core" / "lock.json").read_text(encoding="utf-8"))
    assert locked["verdicts"]["vllm-reload-numel-guard"] == {"0.22.1": "affected"}
    assert project.start("scan").returncode == 0
    said = project.refuses("run", "--cell", "vllm-9.9.9", code=2)
    assert said == "compat: no cell or upstream is called 'vllm-9.9.9' (did you mean vllm-0.22.1 or vllm?)"


def test_a_wheel_that_has_lost_a_file_is_not_as_locked(project: Copy, index: Index) -> None:
    assert project.start("scan", "--write").returncode == 0
    shutil.rmtree(fetch.cache())
    index.add(WHEEL, wheel({LAYERWISE: ""}))
    before = project.files()
    done = project.start("scan")
    assert (done.returncode, done.stdout) == (1, "lock.json is not what the releases say: run with --write\n")
    assert project.files() == before


@pytest.mark.parametrize(
    ("name", "content", "yanked", "said"),
    [
        ("0.22.1", wheel({META: ""}), "broken", "vllm 0.22.1 was yanked: broken"),
        ("0.22.1", b"no wheel", None, f"{WHEEL} cannot be read"),
        ("0.22.1", wheel({META: "def f(:\n"}), None, "vllm 0.22.1 is no Python of this interpreter"),
        ("0.23.0", b"", None, "vllm 0.22.1 does not exist in the package index (the newest is 0.23.0)"),
    ],
    ids=["yanked", "no zip", "no Python", "not there"],
)
def test_a_scan_of_a_release_that_cannot_be_read(
    project: Copy, index: Index, name: str, content: bytes, yanked: str | None, said: str
) -> None:
    del index.files[WHEEL]
    index.add(f"vllm-{name}-py3-none-any.whl", content, yanked=yanked)
    assert project.refuses("scan", "--write").startswith(f"compat: {said}")


def test_a_new_release_that_cannot_be_read(project: Copy, index: Index) -> None:
    done = project.start("scan", "--new")
    assert (done.returncode, done.stdout) == (0, "vllm: releases after 0.22.1: none\n")
    index.add("vllm-0.23.0-py3-none-any.whl", b"no wheel")
    done = project.start("scan", "--new")
    assert (done.returncode, done.stderr) == (1, "")
    assert "  vllm-0.23.0-py3-none-any.whl cannot be read (" in done.stdout


def test_a_result_of_another_patch_set_is_not_locked_and_stays_for_now(project: Copy, index: Index) -> None:
    project.write_result(patch_set="0123456789abcdef")
    said = project.refuses("scan", "--write")
    assert said.startswith(f"compat: {CELL.name}.json was written by another patch set (0123456789abcdef, this is ")
    assert said.endswith(f"run `python -m compat run --cell {CELL.name}`")
    index.add(SDIST, sdist({META: ""}), cut=20)
    assert project.refuses("run", "--cell", CELL.name).startswith(f"{CELL.name}: {SDIST} cannot be downloaded")
    index.add(SDIST, sdist({META: ""}), digest="f" * 64)
    said = project.refuses("run", "--cell", CELL.name)
    assert said.startswith(f"{CELL.name}: {SDIST} arrived with SHA-256 ")
    assert said.endswith("the index says ffffffffffff…: fetch it again")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"defect"', '"clean"', 1), "was edited by hand (its seal does not fit): "),
        (lambda text: text.replace('"seal"', '"sael"'), "is no result ("),
        (lambda text: text[: len(text) // 2], "is no result ("),
        (lambda _: "", "is no result ("),
        (lambda _: "[]", "is no result ("),
        (lambda _: "\udcff", "is no result ("),
    ],
    ids=["edited", "misspelt", "truncated", "empty", "no object", "no text"],
)
def test_a_broken_result(project: Copy, change: Callable[[str], str], said: str) -> None:
    project.result.write_bytes(change(project.result.read_text(encoding="utf-8")).encode("utf-8", "surrogateescape"))
    with pytest.raises(results.ResultError) as caught, project.kept_there():
        results.load(CELL)
    line = str(caught.value)
    assert line.startswith(f"{CELL.name}.json {said}")
    assert line.endswith(f"run `python -m compat run --cell {CELL.name} --again`")
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("command", [("run", "--cell", CELL.name), ("scan", "--write")], ids=["run", "scan"])
def test_what_a_broken_result_stops(project: Copy, command: tuple[str, ...]) -> None:
    text = project.result.read_text(encoding="utf-8")
    project.result.write_text(text[:100], encoding="utf-8")
    assert project.refuses(*command).startswith(f"compat: {CELL.name}.json is no result (")
    project.result.write_text(text.replace('"defect"', '"clean"', 1), encoding="utf-8")
    assert project.refuses(*command).startswith(f"compat: {CELL.name}.json was edited by hand")
    project.write_result(cell=Cell("vllm", "0.23.0"))
    assert project.refuses(*command).startswith(f"compat: {CELL.name}.json is of vllm 0.23.0: run ")
