"""The command on a real Ray cluster of two nodes, which share this machine's disk and stage into a folder each."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nemotron_ultra.conftest import RAY_ENVIRONMENT, ROOT, SHARDS, error
from tests.nemotron_ultra.test_place import identities

cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.timeout(900)

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head and a worker. Ports are Ray's choice, and no other cluster of this machine is touched."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray notes the latest cluster in this folder, whose path must be short enough for sockets.
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        for name, value in {**RAY_ENVIRONMENT, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        cluster = cluster_utils.Cluster()
        try:
            cluster.add_node(**NODE, include_dashboard=False)
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def folders(target: Path) -> list[Path]:
    """The folder of each node."""
    return sorted(path / "model" for path in target.iterdir())


def test_one_file_cut_short_on_one_node_is_repaired_there_alone(
    nodes: Any, mirror: Path, tmp_path: Path, stage: Callable[..., Any]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    arguments = ("--model", mirror, "--to", tmp_path / "to" / "{node}", "--data", tmp_path / "data")
    arguments += ("--ray", nodes.address)
    first = stage(*arguments)
    assert first.returncode == 0, first.stderr
    one, other = folders(tmp_path / "to")
    assert (one.parent / "data" / "train.jsonl").is_file()
    assert (other / "chat_template.jinja").is_file()
    os.truncate(other / SHARDS[2], 1000)
    before = identities(one), identities(other)
    second = stage(*arguments)
    assert second.returncode == 0, second.stderr
    after = identities(one), identities(other)
    assert after[0] == before[0]
    assert {name for name in after[1] if after[1][name] != before[1].get(name)} == {SHARDS[2]}
    assert (other / SHARDS[2]).read_bytes() == (mirror / SHARDS[2]).read_bytes()
    said = [line for line in second.stdout.splitlines() if "put in place model" in line]
    assert len(said) == 1
    assert said[0].endswith(f"({other.parent.name}): put in place model/{SHARDS[2]}")

    (other / "model-00009-of-00009.safetensors").write_bytes(b"of another revision")
    assert f"({other.parent.name}) also has model/model-00009-of-00009.safetensors" in error(stage(*arguments))


def test_a_mirror_of_repositories_and_one_shared_folder(
    nodes: Any, mirror: Path, tmp_path: Path, stage: Callable[..., Any]
) -> None:
    (tmp_path / "all" / "nvidia").mkdir(parents=True)
    mirror.rename(tmp_path / "all" / "nvidia" / "ultra")
    found = stage(
        "--model", "nvidia/ultra", "--mirror", tmp_path / "all", "--to", tmp_path / "to", "--ray", nodes.address
    )
    assert found.returncode == 0, found.stderr
    # Two nodes on one disk take turns: the second finds all of it there.
    count = len(list((tmp_path / "to" / "model").iterdir()))
    rows = re.findall(r"\([0-9a-f]{8}\) +(\d+) +(\d+) ", found.stdout)
    assert sorted(rows) == sorted([("0", str(count)), (str(count), "0")])
    assert (tmp_path / "to" / "model" / SHARDS[0]).is_file()


def test_a_node_that_dies_is_named_and_the_others_are_whole(nodes: Any, mirror: Path, tmp_path: Path) -> None:
    with (mirror / "weights.model").open("wb") as file:
        file.truncate(3 << 30)
    doomed = nodes.add_node(**NODE)
    short = doomed.node_id[:8]
    running = subprocess.Popen(
        [sys.executable, "-m", "examples.nemotron_ultra.stage", "--model", str(mirror), "--to",
         str(tmp_path / "{node}" / "to"), "--ray", nodes.address, "--threads", "2"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    partial = tmp_path / short / "to" / "model" / ".weights.model.partial"
    until = time.monotonic() + 300
    while not partial.exists():
        assert time.monotonic() < until
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)
    nodes.remove_node(doomed, allow_graceful=False)
    out, err = running.communicate(timeout=600)
    found = error(subprocess.CompletedProcess(running.args, running.returncode, out, err))
    assert f"({short}): died while it staged" in found
    assert "repeat the command" in found
    whole = [path for path in tmp_path.glob("*/to/model/weights.model") if path.stat().st_size == 3 << 30]
    assert len(whole) == 2
    assert not (partial.parent / "weights.model").exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ("--model", "nvidia/ultra", "--to", "/x"),
            "HF_HUB_OFFLINE is set and this is no folder: give --mirror FOLDER",
        ),
        (
            ("--model", "nvidia/ultra", "--to", "/x", "--mirror", "/nowhere"),
            "--mirror: no folder /nowhere/nvidia/ultra",
        ),
        (("--model", "nvidia/ultra", "--to", "here"), "--to here: give an absolute path"),
    ],
)
def test_bad_input_is_one_line_before_ray_is_asked(
    stage: Callable[..., Any], arguments: tuple[str, ...], wanted: str
) -> None:
    assert wanted in error(stage(*arguments))


def test_no_cluster(mirror: Path, tmp_path: Path, stage: Callable[..., Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        found = stage("--model", mirror, "--to", tmp_path / "to", "--ray", address, RAY_AUTH_MODE="disabled")
    assert f"--ray {address}: no cluster there" in error(found)
    assert not (tmp_path / "to").exists()


def test_an_address_that_is_no_node(nodes: Any, mirror: Path, tmp_path: Path, stage: Callable[..., Any]) -> None:
    found = stage("--model", mirror, "--to", tmp_path / "to", "--ray", nodes.address, "--nodes", "203.0.113.9")
    assert "--nodes: 203.0.113.9 is none of " in error(found)
    assert not (tmp_path / "to").exists()
