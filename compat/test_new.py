"""Releases after the matrix: a pretended end of the matrix against the real index, and an index of this machine's own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from compat import fetch, matrix, new
from ultra_patches.core import lock

META = "vllm/model_executor/model_loader/reload/meta.py"
GUARD, VIEW, LAYOUT = "vllm-reload-numel-guard", "vllm-mamba-conv-weights", "vllm-ipc-rank-layout"


@dataclass
class File:
    """One file of the index. `digest` is what the page says of it, None where it says nothing; `cut` bytes are kept back."""

    content: bytes
    digest: str | None
    yanked: str | None = None
    cut: int = 0


class Index:
    """A package index on 127.0.0.1 and the files it has, by name."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.ranges = True
        self.sent = 0
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple/"

    def add(
        self, name: str, content: bytes, *, digest: str | None = "", yanked: str | None = None, cut: int = 0
    ) -> None:
        """Put a file there, with its own digest unless another or none is given."""
        right = hashlib.sha256(content).hexdigest()
        self.files[name] = File(content, right if digest == "" else digest, yanked, cut)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        kind, _, name = request.path.strip("/").partition("/")
        if kind == "simple" and name in self.pages:
            self._send(request, 200, *self.pages[name])
        elif kind == "simple" and (
            links := [self._link(n) for n in self.files if n.startswith(name.replace("-", "_"))]
        ):
            self._send(request, 200, "text/html", "\n".join(links).encode())
        elif kind == "files" and name in self.files:
            self._send_file(request, self.files[name])
        else:
            self._send(request, 404, "text/plain", b"")

    def _link(self, name: str) -> str:
        file = self.files[name]
        anchor = f"#sha256={file.digest}" if file.digest else ""
        yanked = "" if file.yanked is None else f' data-yanked="{file.yanked}"'
        return f'<a href="../../files/{name}{anchor}"{yanked}>{name}</a>'

    def _send_file(self, request: BaseHTTPRequestHandler, file: File) -> None:
        size = len(file.content)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if asked is None or not self.ranges:  # as any server does with a range that makes no sense
            self._send(request, 200, "application/octet-stream", file.content, cut=file.cut)
            return
        first, last = asked.groups()
        start, end = (int(first), int(last or size - 1)) if first else (max(0, size - int(last)), size - 1)
        part = file.content[start : end + 1]
        where = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{size}"}
        self._send(request, 206, "application/octet-stream", part, where)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        code: int,
        kind: str,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        cut: int = 0,
    ) -> None:
        request.send_response(code)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.end_headers()
        sent = content[: len(content) - cut]
        self.sent += len(sent)
        request.wfile.write(sent)


def wheel(members: Mapping[str, str | bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return made.getvalue()


def sdist(members: Mapping[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(f"vllm-0.22.1/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return made.getvalue()


@contextlib.contextmanager
def serving(cache: Path) -> Iterator[Index]:
    """An empty index that pip, uv and `compat` would use, and a cache of this test's own."""
    made = Index()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,))
    thread.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UV_DEFAULT_INDEX", made.url)
        patched.setenv("XDG_CACHE_HOME", str(cache))
        patched.setenv("NO_PROXY", "127.0.0.1")
        fetch.packages.cache_clear()
        yield made
    fetch.packages.cache_clear()
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def has(*projects: str) -> None:
    """Skip where the real index cannot be reached, and never in CI."""
    try:
        for project in projects:
            fetch.packages(project)
    except fetch.FetchError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI reads the real index: {error}")
        pytest.skip(str(error))


def reported(upstream: str, upto: str, *, pre: bool = False) -> dict[str, dict[str, new.Carryover]]:
    """The rows by release and patch, for a matrix that ends early."""
    has(upstream)
    (found,) = new.compare({upstream: matrix.read()[upstream]}, {upstream: upto}, pre=pre).upstreams
    assert [r.failure for r in found.releases if r.failure] == []
    assert [r.name for r in found.releases] == list(found.index.new)
    return {release.name: {row.patch: row for row in release.rows} for release in found.releases}


@pytest.mark.upstream
def test_vllm_after_0_23_0() -> None:
    rows = reported("vllm", "0.23.0")
    assert list(rows)[:4] == ["0.24.0", "0.25.0", "0.25.1", "0.26.0"]
    verdict = lock.load().verdicts[VIEW].get("0.23.0")
    assert rows["0.24.0"][VIEW] == new.Carryover(VIEW, new.UNCHANGED, "0.23.0", verdict)
    (guard,) = rows["0.24.0"][GUARD].functions
    assert (guard.key.partition(":")[2], guard.state, guard.signature) == ("get_numel_loaded", new.CHANGED, None)
    assert guard.diff[:2] == ("--- vllm 0.23.0", "+++ vllm 0.24.0")
    assert "-    return counter.copied_numel, return_value" in guard.diff
    assert "+        numel = min(numel, param.numel())" in guard.diff
    assert rows["0.25.0"][GUARD] == new.Carryover(GUARD, new.CHANGED, repeats="0.24.0")
    (receive,) = rows["0.25.0"][LAYOUT].functions
    assert receive.signature == ("(self, update_info, load_weights)", "(self, update_info)")
    assert {(f.key.partition(":")[2], f.state) for f in rows["0.27.0"][LAYOUT].functions} >= {
        ("IPCTrainerWeightTransferEngine._send_packed", new.ADDED),
        ("IPCWeightTransferEngine._send_packed", new.GONE),
    }


@pytest.mark.upstream
def test_megatron_bridge_after_0_5_1_and_after_0_4_2() -> None:
    rows = reported("megatron-bridge", "0.5.1")["0.6.0"]
    assert rows["bridge-router-bias-unimodal"].like == "0.5.1", "it has the function no more than 0.5.1"
    assert [f.state for f in rows["bridge-router-bias-export"].functions] == [new.ADDED]
    (model,) = rows["bridge-router-bias-get-model"].functions
    assert any(line.startswith("-") and "keep_in_fp32" in line for line in model.diff)
    assert reported("megatron-bridge", "0.4.2")["0.5.0"]["bridge-router-bias-unimodal"].state == new.GONE


@pytest.mark.upstream
def test_megatron_core_without_yanked_releases_and_candidates() -> None:
    rows = reported("megatron-core", "0.17.1")
    assert list(rows)[:4] == ["0.18.0", "0.18.2", "0.19.0", "0.19.2"]
    assert rows["0.18.0"]["megatron-router-bias-fp32"].like == "0.17.1"
    listed = fetch.packages("megatron-core")
    known = ("0.16.0", "0.16.1", "0.17.1", "0.18.0", "0.18.1")
    assert new.split(listed, known, pre=False).unlisted == ("0.17.0",)
    assert new.split(listed, known, pre=True).unlisted == ("0.17.0rc0", "0.17.0")
    assert new.split(listed, known, pre=True).withdrawn == ("0.18.1",)


@pytest.mark.upstream
def test_a_yanked_release_and_one_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has("megatron-core")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(fetch.FetchError, match=r"^megatron-core 0\.18\.1 was yanked: wrong version$"):
        fetch.tree("megatron-core", "0.18.1")
    with pytest.raises(fetch.FetchError, match=r"^megatron-core 99\.0 does not exist in the package index"):
        fetch.files("megatron-core", "99.0", ["megatron/core/utils.py"])


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with serving(tmp_path) as made:
        yield made


def test_which_releases_are_new(index: Index) -> None:
    names = ("0.9.0", "0.10.0", "0.10.1", "0.11.0rc1", "0.11.0", "0.12.0.dev1", "0.12.0rc2", "0.12.0.post1", "0.100.0")
    for name in names:
        index.add(f"vllm-{name}-py3-none-any.whl", b"")
    index.add("vllm-0.13.0-py3-none-any.whl", b"", yanked="broken")
    index.add("vllm-0.14.0-py3-none-any.whl", b"", yanked="this file alone")
    index.add("vllm-0.14.0.tar.gz", b"")
    index.add("vllm-not_a_version.tar.gz", b"")
    known = ("0.10.0", "0.10.2", "0.11.0")
    final = new.split(fetch.packages("vllm"), known, pre=False)
    assert final == new.Index(("0.12.0.post1", "0.14.0", "0.100.0"), ("0.10.1",), ("0.10.2",))
    every = new.split(fetch.packages("vllm"), known, pre=True)
    assert every.new == ("0.12.0.dev1", "0.12.0rc2", "0.12.0.post1", "0.14.0", "0.100.0")
    assert every.unlisted == ("0.10.1", "0.11.0rc1")


def test_a_release_that_cannot_be_read_does_not_hide_the_others(index: Index) -> None:
    function = "def get_numel_loaded({}):\n    # {}\n    return {}\n"
    wheels = {
        "0.33.0": wheel({META: function.format("loader, args", "old", 1)}),
        "0.34.0": wheel({META: function.format("loader, args, *, strict=True", "new", 2)}),
        "0.35.0": b"no wheel",
        "0.36.0": wheel({META: function.format("loader, args, *, strict=True", "other words", 2)}),
        "0.37.0": wheel({META: "def get_numel_loaded(:\n"}),
        "0.38.0": wheel({}),
    }
    for name, content in wheels.items():
        index.add(f"vllm-{name}-py3-none-any.whl", content)
    entry = replace(matrix.read()["vllm"], releases=("0.33.0",))
    found = new.compare({"vllm": entry})
    failures = {release.name: release.failure for release in found.upstreams[0].releases}
    assert [name for name, failure in failures.items() if failure] == ["0.35.0", "0.37.0"]
    rows = {r.name: row for r in found.upstreams[0].releases for row in r.rows if row.patch == GUARD}
    assert [(name, row.state, row.repeats) for name, row in rows.items()] == [
        ("0.34.0", new.CHANGED, None),
        ("0.36.0", new.CHANGED, "0.34.0"),
        ("0.38.0", new.GONE, None),
    ]
    text = new.lines(found)
    assert text[0] == "vllm: releases after 0.33.0: 0.34.0, 0.35.0, 0.36.0, 0.37.0, 0.38.0"
    at = text.index(f"  {GUARD}: changed since 0.33.0")
    assert text[at + 1 : at + 11] == [
        "    vllm.model_executor.model_loader.reload.meta:get_numel_loaded changed",
        "    called (loader, args, *, strict=), before (loader, args)",
        "    --- vllm 0.33.0",
        "    +++ vllm 0.34.0",
        "    @@ -1,3 +1,3 @@",
        "    -def get_numel_loaded(loader, args):",
        "    -    # old",
        "    -    return 1",
        "    +def get_numel_loaded(loader, args, *, strict=True):",
        "    +    # new",
    ]
    assert f"  {GUARD}: gone since 0.33.0" in text
    assert f"  {GUARD}: changed, as in 0.34.0" in text
    assert sum(line.startswith("  vllm-0.35.0-py3-none-any.whl cannot be read") for line in text) == 1
    assert found.needs_attention


def test_nothing_new(index: Index) -> None:
    index.add("vllm-0.33.0-py3-none-any.whl", b"")
    found = new.compare({"vllm": replace(matrix.read()["vllm"], releases=("0.33.0",))})
    assert new.lines(found) == ["vllm: releases after 0.33.0: none"]
    assert not found.needs_attention
