"""What is put into a folder, and what is left alone there."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.errors import RunError
from examples.nemotron_ultra import manifest
from examples.nemotron_ultra.place import Contents, Mirror, Part, Placed, place
from tests.nemotron_ultra.conftest import ROOT, SHARDS


def put(mirror: Path, target: Path) -> Placed:
    return place([Part("model", manifest.of_folder(mirror, 2), Mirror(mirror))], target, 2)


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the last change of every file."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def same_bytes(mirror: Path, target: Path) -> bool:
    return all((target / "model" / name).read_bytes() == (mirror / name).read_bytes() for name in SHARDS)


def test_all_parts_of_a_model_are_put_in_place_and_nothing_else(mirror: Path, tmp_path: Path) -> None:
    found = put(mirror, tmp_path / "to")
    names = {path.name for path in (tmp_path / "to" / "model").iterdir()}
    assert names == {path.name for path in mirror.iterdir()} - {"README.md", manifest.MANIFEST}
    assert {"chat_template.jinja", "modeling_nemotron_h.py"} < names
    assert len(found.repaired) == len(names)
    assert same_bytes(mirror, tmp_path / "to")


@pytest.mark.parametrize("harm", ["short", "altered", "absent", "long"])
def test_one_file_that_is_wrong_is_repaired_alone(mirror: Path, tmp_path: Path, harm: str) -> None:
    put(mirror, tmp_path / "to")
    victim = tmp_path / "to" / "model" / SHARDS[1]
    whole = victim.read_bytes()
    wrong = {"short": whole[:1000], "altered": whole[:-1] + bytes([whole[-1] ^ 1]), "long": whole + b"x", "absent": b""}
    victim.write_bytes(wrong[harm])
    if harm == "absent":
        victim.unlink()
    before = identities(victim.parent)
    found = put(mirror, tmp_path / "to")
    assert found.repaired == [f"model/{SHARDS[1]}"]
    assert found.written == len(whole)
    after = identities(victim.parent)
    assert {name for name in after if after[name] != before.get(name)} == {SHARDS[1]}
    assert victim.read_bytes() == whole


def test_when_all_is_right_nothing_is_touched(mirror: Path, tmp_path: Path) -> None:
    first = put(mirror, tmp_path / "to")
    before = identities(tmp_path / "to" / "model")
    again = put(mirror, tmp_path / "to")
    assert (again.repaired, again.written, again.digest) == ([], 0, first.digest)
    assert identities(tmp_path / "to" / "model") == before


def test_a_copy_that_was_killed_goes_on_where_it_was(mirror: Path, tmp_path: Path) -> None:
    big = mirror / "weights.model"
    with big.open("wb") as file:
        file.write(b"begin")
        file.truncate(1 << 30)
    manifest.of_folder(mirror, 2)
    code = (
        "import sys; from pathlib import Path; from examples.nemotron_ultra import manifest; "
        "from examples.nemotron_ultra.place import Mirror, Part, place; mirror = Path(sys.argv[1]); "
        "place([Part('model', manifest.of_folder(mirror, 2), Mirror(mirror))], Path(sys.argv[2]), 2)"
    )
    copying = subprocess.Popen([sys.executable, "-c", code, str(mirror), str(tmp_path / "to")], cwd=ROOT)
    partial = tmp_path / "to" / "model" / ".weights.model.partial"
    while not (partial.exists() and partial.stat().st_size > 16 << 20):
        assert copying.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    copying.send_signal(signal.SIGKILL)
    copying.wait()
    kept = partial.stat()
    assert 16 << 20 < kept.st_size < 1 << 30
    assert not (partial.parent / big.name).exists()
    found = put(mirror, tmp_path / "to")
    assert f"model/{big.name}" in found.repaired
    assert (partial.parent / big.name).stat().st_ino == kept.st_ino  # the same file, completed
    assert not partial.exists()
    assert manifest.sha256(partial.parent / big.name) == manifest.sha256(big)


def test_what_an_earlier_copy_left_and_is_wrong_is_begun_anew(mirror: Path, tmp_path: Path) -> None:
    (tmp_path / "to" / "model").mkdir(parents=True)
    (tmp_path / "to" / "model" / f".{SHARDS[0]}.partial").write_bytes(b"of another revision")
    put(mirror, tmp_path / "to")
    assert same_bytes(mirror, tmp_path / "to")


def test_no_room_is_said_before_anything_is_written(mirror: Path, tmp_path: Path) -> None:
    with (tmp_path / "huge.model").open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free + (1 << 30))
    # Its hash would take hours, and is not asked for where there is no room.
    huge = manifest.File("huge.model", (tmp_path / "huge.model").stat().st_size, "0" * 64)
    files = [*manifest.of_folder(mirror, 2), huge]
    with pytest.raises(RunError, match=r"needs [\d,]+ bytes more and has [\d,]+ free: make room there"):
        place([Part("model", files, Mirror(tmp_path))], tmp_path / "to", 2)
    assert list((tmp_path / "to" / "model").iterdir()) == []


def test_a_mirror_that_changes_after_its_manifest_is_refused(mirror: Path, tmp_path: Path) -> None:
    files = manifest.of_folder(mirror, 2)
    whole = (mirror / SHARDS[2]).read_bytes()
    (mirror / SHARDS[2]).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RunError, match=f"{SHARDS[2]} from mirror is not what its manifest says"):
        place([Part("model", files, Mirror(mirror))], tmp_path / "to", 2)
    assert not (tmp_path / "to" / "model" / SHARDS[2]).exists()
    (mirror / SHARDS[2]).unlink()
    with pytest.raises(RunError, match="is not there on this node: mount the mirror on every node"):
        place([Part("model", files, Mirror(mirror))], tmp_path / "to", 2)


def test_contents_that_come_with_the_task(tmp_path: Path) -> None:
    content = b'{"question": "a", "answer": "#### 1"}\n'
    part = Part("data", [manifest.of_bytes("train.jsonl", content)], Contents({"train.jsonl": content}))
    assert place([part], tmp_path, 1).repaired == ["data/train.jsonl"]
    assert place([part], tmp_path, 1).right == ["data/train.jsonl"]
    assert (tmp_path / "data" / "train.jsonl").read_bytes() == content


def test_a_target_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be made .* give another --to"):
        place([Part("model", [], Contents({}))], tmp_path / "file", 1)
