"""Mirrors, manifests, targets and data that somebody else made: one clear line, and nothing written that was not asked for."""

import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray")

from examples.errors import RunError, reported
from examples.nemotron_ultra import cluster_ready, gsm8k, manifest, stage
from examples.nemotron_ultra.place import Contents, Mirror, Part, place
from tests.hostile.full_disk import limited
from tests.nemotron_ultra import conftest
from tests.nemotron_ultra.conftest import ROOT, SHARDS

mirror = conftest.mirror

DEEP = "[" * 100_000
Damage = Callable[[Path], object]


def line(work: Callable[[], object]) -> str:
    """The one line that an error says; anything else that is raised is a traceback to a user."""
    with pytest.raises(RunError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewritten(path: Path, restored: bool) -> None:
    """Another content of the same length; as `rsync --inplace --times` leaves it where the time is restored."""
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if restored:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("restored", [False, True])
def test_a_checkpoint_of_the_same_sizes_over_the_old_one_is_not_called_right(
    mirror: Path, tmp_path: Path, restored: bool
) -> None:
    def put() -> Any:
        return place([Part("model", manifest.of_folder(mirror, 2), Mirror(mirror))], tmp_path / "to", 2)

    put()
    for name in SHARDS:
        rewritten(mirror / name, restored)
    said = line(put)
    assert "is not the file that stage-manifest.json was made of, 4 of 9 are not" in said
    assert "remove the manifest where another revision was put there" in said
    (mirror / manifest.MANIFEST).unlink()
    assert put().repaired == [f"model/{name}" for name in SHARDS]
    assert all((tmp_path / "to" / "model" / name).read_bytes() == (mirror / name).read_bytes() for name in SHARDS)


def test_what_was_copied_anew_with_the_same_content_is_hashed_again_and_right(mirror: Path) -> None:
    first = manifest.of_folder(mirror, 2)
    content = (mirror / SHARDS[0]).read_bytes()
    (mirror / SHARDS[0]).unlink()
    (mirror / SHARDS[0]).write_bytes(content)
    assert manifest.of_folder(mirror, 2) == first


def test_a_manifest_of_an_earlier_release_is_read_and_its_files_are_hashed_again(mirror: Path) -> None:
    manifest.of_folder(mirror, 2)
    rows = json.loads((mirror / manifest.MANIFEST).read_text())["files"]
    old = [{key: row[key] for key in ("name", "size", "sha256")} for row in rows]
    (mirror / manifest.MANIFEST).write_text(json.dumps({"files": old}))
    assert {file.name for file in manifest.of_folder(mirror, 2)} == {row["name"] for row in rows}
    rewritten(mirror / SHARDS[0], restored=True)
    (mirror / manifest.MANIFEST).write_text(json.dumps({"files": old}))
    assert "is not the file that" in line(lambda: manifest.of_folder(mirror, 2))


GOOD = {"name": "config.json", "size": 28, "sha256": "0" * 64}
ROWS = {
    "above": {**GOOD, "name": "../secret.json"},
    "absolute": {**GOOD, "name": "/etc/secret.json"},
    "itself": {**GOOD, "name": "stage-manifest.json"},
    "hidden": {**GOOD, "name": ".bash.json"},
    "a line": {**GOOD, "name": "a\nerror: b.json"},
    "an escape": {**GOOD, "name": "\x1b[2J.json"},
    "a zero": {**GOOD, "name": "a\0.json"},
    "half a character": {**GOOD, "name": "\ud800.json"},
    "no text": {**GOOD, "name": 7},
    "a list": {**GOOD, "name": ["a"]},
    "negative": {**GOOD, "size": -1},
    "a truth": {**GOOD, "size": True},
    "a fraction": {**GOOD, "size": 28.0},
    "a size as text": {**GOOD, "size": "28"},
    "a short hash": {**GOOD, "sha256": "0"},
    "no hash": {**GOOD, "sha256": None},
    "a stamp as text": {**GOOD, "stamp": "now"},
    "a short stamp": {**GOOD, "stamp": [1]},
    "no row": None,
    "a row of text": "config.json",
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_of_a_manifest_that_names_no_file_of_its_folder(mirror: Path, row: Any) -> None:
    (mirror / manifest.MANIFEST).write_text(json.dumps({"files": [row]}))
    assert "is not a manifest: remove it" in line(lambda: manifest.of_folder(mirror, 2))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("config.json"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ROW = st.fixed_dictionaries(
    {}, optional={"name": VALUES | st.sampled_from(["config.json", "../a.json", *SHARDS]), "size": VALUES | st.just(28),
                  "sha256": VALUES | st.just("0" * 64), "stamp": VALUES | st.lists(st.integers(), min_size=3, max_size=3)},
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")
    (folder / "config.json").write_text('{"model_type": "nemotron_h"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@settings(max_examples=150, deadline=None)
@given(VALUES | st.fixed_dictionaries({"files": VALUES | st.lists(ROW, max_size=3)}))
def test_whatever_a_manifest_says_the_files_are_those_of_the_folder_or_it_is_one_line(small: Path, said: Any) -> None:
    (small / manifest.MANIFEST).write_text(json.dumps(said))
    try:
        found = manifest.of_folder(small, 1)
    except RunError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 # either outcome is right, each in its form
    else:
        assert {file.name: file.size for file in found} == {
            path.name: path.stat().st_size for path in small.iterdir() if path.name != manifest.MANIFEST
        }


def header(text: str) -> Damage:
    content = struct.pack("<Q", len(text)) + text.encode()
    return lambda mirror: (mirror / SHARDS[0]).write_bytes(content)


def text(name: str, content: "str | bytes") -> Damage:
    return lambda mirror: (mirror / name).write_bytes(content.encode() if isinstance(content, str) else content)


INDEX = manifest.INDEX
MIRRORS: dict[str, tuple[Damage, str]] = {
    "index: a list": (text(INDEX, "[]"), INDEX),
    "index: no map": (text(INDEX, "{}"), INDEX),
    "index: an empty map": (text(INDEX, '{"weight_map": {}}'), INDEX),
    "index: a map that is a list": (text(INDEX, '{"weight_map": ["a"]}'), INDEX),
    "index: names that are lists": (text(INDEX, '{"weight_map": {"a": [1]}}'), INDEX),
    "index: names that are numbers": (text(INDEX, '{"weight_map": {"a": 1, "b": "c"}}'), INDEX),
    "index: deep": (text(INDEX, DEEP), INDEX),
    "index: no UTF-8": (text(INDEX, b"\xff\xfe\xff"), INDEX),
    "index: above": (text(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), "is missing"),
    "tokenizer: a list": (text("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "tokenizer: deep": (text("tokenizer_config.json", DEEP), "tokenizer_config.json"),
    "shard: deep": (header(DEEP), SHARDS[0]),
    "shard: rows that are none": (header('{"a": 1}'), SHARDS[0]),
    "shard: no offsets": (header('{"a": {"data_offsets": []}}'), SHARDS[0]),
    "shard: offsets that are texts": (header('{"a": {"data_offsets": ["", ""]}}'), SHARDS[0]),
    "shard: offsets that are NaN": (header('{"a": {"data_offsets": [0, NaN]}}'), SHARDS[0]),
    "shard: a huge header": (lambda mirror: (mirror / SHARDS[0]).write_bytes(b"\xff" * 8), SHARDS[0]),
    "manifest: deep": (text(manifest.MANIFEST, DEEP), "is not a manifest"),
    "manifest: no UTF-8": (text(manifest.MANIFEST, b"\xff"), "is not a manifest"),
    "manifest: no list": (text(manifest.MANIFEST, '{"files": 7}'), "is not a manifest"),
    "manifest: twice": (text(manifest.MANIFEST, json.dumps({"files": [GOOD, GOOD]})), "two lines for one file"),
    "manifest: a folder": (lambda mirror: (mirror / manifest.MANIFEST).mkdir(), "no file"),
    "manifest: a pipe": (lambda mirror: os.mkfifo(mirror / manifest.MANIFEST), "no file"),
    "a shard that is a pipe": (
        lambda mirror: ((mirror / SHARDS[0]).unlink(), os.mkfifo(mirror / SHARDS[0])),
        f"{SHARDS[0]} is missing",
    ),
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("damage", "wanted"), MIRRORS.values(), ids=MIRRORS)
def test_a_mirror_that_is_none(mirror: Path, damage: Damage, wanted: str) -> None:
    damage(mirror)
    assert wanted in line(lambda: manifest.of_folder(mirror, 2))


@pytest.mark.parametrize("name", ["..", "../out", "/tmp/out", "a/b", "", ".", "a\0b"])
def test_nothing_is_put_beside_the_folder(tmp_path: Path, name: str) -> None:
    part = Part("data", [manifest.File(name, 4, manifest.of_bytes("", b"evil").sha256)], Contents({name: b"evil"}))
    assert "is not the name of a file: nothing was written" in line(
        lambda: place([part], tmp_path / "mirror" / "to", 1)
    )
    assert not (tmp_path / "mirror").exists()
    assert not (tmp_path / "out").exists()


PART = Part("data", [manifest.of_bytes("train.jsonl", b"x" * 4096)], Contents({"train.jsonl": b"x" * 4096}))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
@pytest.mark.parametrize("name", [".stage.lock", "data/.train.jsonl.partial"])
def test_what_lies_where_a_file_of_ours_goes_is_neither_emptied_nor_followed(
    tmp_path: Path, kind: str, name: str
) -> None:
    mine = tmp_path / "mine"
    planted = tmp_path / "to" / name
    planted.parent.mkdir(parents=True)
    if kind == "link":
        mine.write_text("precious")
        planted.symlink_to(mine)
    elif kind == "link to nothing":
        planted.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.mkdir()
    with contextlib.suppress(RunError):
        place([PART], tmp_path / "to", 1)
    assert mine.read_text() == "precious" if kind == "link" else not mine.exists()
    if name == ".stage.lock":
        assert f"{planted} is no file of this command" in line(lambda: place([PART], tmp_path / "to", 1))
        assert not (tmp_path / "to" / "data" / "train.jsonl").exists()
    elif kind != "folder":
        assert (tmp_path / "to" / "data" / "train.jsonl").read_bytes() == b"x" * 4096


def test_a_link_in_the_place_of_a_copy_begun_before_is_not_written_through(mirror: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "to" / "model").mkdir(parents=True)
    (tmp_path / "to" / "model" / f".{SHARDS[0]}.partial").symlink_to(tmp_path / "mine")
    part = Part("model", manifest.of_folder(mirror, 2), Mirror(mirror))
    assert "is no file of this command" in line(lambda: place([part], tmp_path / "to", 2))
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_folder_in_the_place_of_a_file_and_a_full_disk_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "to" / "data" / "train.jsonl").mkdir(parents=True)
    assert "what is whole stays" in line(lambda: place([PART], tmp_path / "to", 1))
    (tmp_path / "to" / "data" / "train.jsonl").rmdir()
    with limited(1024):
        assert "File too large" in line(lambda: place([PART], tmp_path / "to", 1))
    assert place([PART], tmp_path / "to", 1).repaired == ["data/train.jsonl"]


ROW_OF_DATA = b'{"question": "a", "answer": "#### 1"}\n'
DATA: dict[str, tuple[bytes, str]] = {
    "no UTF-8": (ROW_OF_DATA + b'{"question": "\xff", "answer": "#### 1"}\n', "line 2"),
    "half a character": (b'{"question": "\\ud800", "answer": "#### 1"}\n', "line 1: half a character"),
    "deep": (DEEP.encode(), "line 1"),
    "a number of 9,999 digits": (b"9" * 9999, "line 1"),
    "NaN": (b'{"question": NaN, "answer": "#### 1"}\n', "line 1"),
}


@pytest.mark.parametrize(("content", "wanted"), DATA.values(), ids=DATA)
def test_a_dataset_that_is_none(tmp_path: Path, content: bytes, wanted: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    assert f"train.jsonl, {wanted}" in line(lambda: gsm8k.collect(tmp_path))


@pytest.mark.timeout(120)
def test_a_dataset_that_is_a_pipe_or_a_folder_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.jsonl")
    (tmp_path / "test.jsonl").mkdir()
    assert "no train or test file" in line(lambda: gsm8k.collect(tmp_path))


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1).filter(str.strip))
def test_what_is_staged_is_what_the_driver_loads(tmp_path_factory: pytest.TempPathFactory, question: str) -> None:
    data = pytest.importorskip("examples.grpo.data")
    folder = tmp_path_factory.mktemp("data")
    (folder / "train.jsonl").write_text(json.dumps({"question": question, "answer": "#### 1"}) + "\n")
    try:
        (folder / "staged").write_bytes(gsm8k.collect(folder)["train.jsonl"])
    except RunError:
        assert any(0xD800 <= ord(mark) < 0xE000 for mark in question)
    else:
        assert [one.question for one in data.load(folder / "staged")] == [question]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--to", "{node}/here"), "--to {node}/here: give an absolute path"),
        (("--to", "here"), "--to here: give an absolute path"),
        (("--to", ""), "--to : give an absolute path"),
        (("--to", "/x", "--threads", "0"), "--threads 0: at least one is needed"),
        (("--to", "/x", "--threads", "-1"), "--threads -1: at least one is needed"),
        (("--to", "/x", "--mirror", "/dev/null"), "--mirror: no folder"),
        (("--to", "/x", "--data", "/dev/zero"), "--data /dev/zero: no train or test file"),
    ],
)  # fmt: skip
def test_an_option_that_means_nothing(
    mirror: Path, arguments: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "a/b" if "--mirror" in arguments else str(mirror)
    assert stage.main(["--model", model, *arguments]) == 1
    found = capsys.readouterr().err
    assert found.startswith("error: ")
    assert wanted in found
    assert found.count("\n") == 1


@pytest.mark.parametrize("address", ["", "a", "a..b:80", "localhost:99999", "localhost:²", "\udcff:80", ":0"])
def test_an_address_that_is_none(address: str) -> None:
    assert not cluster_ready.answers(address)


def test_an_address_that_is_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert cluster_ready.answers(f"127.0.0.1:{server.getsockname()[1]}")


def test_names_do_not_reach_a_terminal_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        (tmp_path / "a\x1b[2J\nerror: b").read_text()

    assert reported(fail) == 1
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert "\x1b" not in found
    assert "No such file" in found


def test_a_mirror_that_may_not_be_read(mirror: Path) -> None:
    code = f"import os, sys; from examples.nemotron_ultra import stage; os.setuid(65534); sys.exit(stage.main({['--model', str(mirror), '--to', '/x']}))"
    # The folders above belong to root alone.
    mirror.chmod(0)
    if os.getuid():
        code = code.replace("os.setuid(65534); ", "")
    found = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    mirror.chmod(stat.S_IRWXU)
    assert found.returncode == 1, found.stderr
    assert "Traceback" not in found.stderr
    assert "error: " in found.stderr
