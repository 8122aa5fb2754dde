"""Two hosts, real Ray and the launch script with its defaults: what joins, what other users of a host see, and what is killed."""

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nemotron_ultra.conftest import RAY_ENVIRONMENT, ROOT
from tests.nemotron_ultra.test_launch import MARK, RAY, left

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

NAMED, IN_A_URL = "s3cret-by-name", "s3cret-in-a-url"
#: What is in the driver's place: where each node is, and what a worker on each has of the environment.
DRIVER = """
import json, os, pathlib, sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init("auto", logging_level="ERROR", log_to_driver=False)
@ray.remote(num_cpus=0)
def seen():
    return {name: os.environ.get(name) for name in ("HF_HUB_TOKEN_RO", "HF_ENDPOINT", "VLLM_ODD")}
nodes = [node for node in ray.nodes() if node["Alive"]]
found = {node["NodeManagerAddress"]: ray.get(seen.options(scheduling_strategy=On(node["NodeID"], False)).remote()) for node in nodes}
ray.shutdown()
whole = pathlib.Path(sys.argv[1] + ".partial")
whole.write_text(json.dumps([len(nodes), found]))
whole.rename(sys.argv[1])
time.sleep(600)
"""


@pytest.fixture
def hosts() -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Two hosts, what runs a command on the first, and their addresses: network namespaces, or where they are not to be had this machine.

    A namespace has addresses and ports of its own, as a host has.
    """
    names = [f"ex{os.getpid()}a", f"ex{os.getpid()}b"]
    addresses = ["10.77.31.1", "10.77.31.2"]
    begin = [["netns", "add", name] for name in names]
    begin += [["link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1]]]
    for name, address in zip(names, addresses, strict=True):
        begin += [["-n", name, "link", "set", "lo", "up"], ["-n", name, "addr", "add", f"{address}/24", "dev", name]]
        # Ray takes the address by which a host would reach the world.
        begin += [["-n", name, "link", "set", name, "up"], ["-n", name, "route", "add", "default", "dev", name]]
    try:
        for arguments in begin:
            subprocess.run(["ip", *arguments], check=True, capture_output=True)
        yield names, ["ip", "netns", "exec", names[0]], addresses
    except (OSError, subprocess.CalledProcessError):
        yield ["here", "there"], [], []
    finally:
        with contextlib.suppress(OSError):
            for name in names:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def environment(tmp_path: Path, hosts: tuple[list[str], list[str], list[str]]) -> Iterator[dict[str, str]]:
    """The script's own defaults: no RAY_START, no HEAD_IP, no REMOTE. Ray's folder is ours, so that no other cluster is touched."""
    names, within, _ = hosts
    # Like ssh it brings nothing of the environment along but a home, and the mark.
    bare = f"env -i HOME={os.environ.get('HOME', '/')} PATH=/usr/sbin:/usr/bin:/bin {MARK}={tmp_path}"
    inside = 'ip netns exec "$1" ' if within else ""
    (tmp_path / "ssh").write_text(f'#!/usr/bin/env bash\nexec {bare} {inside}bash -c "$2"\n')
    (tmp_path / "ssh").chmod(0o755)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "VLLM", "HF_"))}
    yield {
        **kept,
        **RAY_ENVIRONMENT,
        MARK: str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": folder,
        "HOSTS": " ".join(names),
        "PORT": port,
        "READY_S": "200",
        "HF_HUB_TOKEN_RO": NAMED,
        "HF_ENDPOINT": f"https://user:{IN_A_URL}@mirror.example",
        "VLLM_ODD": "two 'words'\nand a line",
    }
    for process in left(tmp_path):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


class Watched(threading.Thread):
    """Another user of this machine, who looks at all command lines all the time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.lines: set[bytes] = set()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    self.lines.add(path.read_bytes())


def test_two_hosts_with_defaults_join_show_no_secret_kill_nobody_and_end_with_a_launch_that_is_killed(
    environment: dict[str, str], hosts: tuple[list[str], list[str], list[str]], tmp_path: Path
) -> None:
    names, within, addresses = hosts
    victim = subprocess.Popen(["sleep", "600"])
    planted = Path(f"/tmp/ray-{getpass.getuser()}-{environment['PORT']}-{names[1]}.pid")
    planted.write_text(f"{victim.pid}\n")
    watched = Watched()
    watched.start()
    report = tmp_path / "report"
    try:
        with (tmp_path / "said").open("w+") as said:
            launch = subprocess.Popen(
                [*within, str(RAY), sys.executable, "-c", DRIVER, str(report)],
                cwd=ROOT, env=environment, stdout=said, stderr=said,
            )  # fmt: skip
            until = time.monotonic() + 300
            while not report.exists():
                assert time.monotonic() < until
                assert launch.poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.1)
        count, seen = json.loads(report.read_text())
        assert count == 2
        assert sorted(seen) == addresses or not within
        for address, variables in seen.items():
            assert variables["HF_ENDPOINT"] == environment["HF_ENDPOINT"], address
            assert variables["VLLM_ODD"] == environment["VLLM_ODD"], address
        if within:
            assert seen[addresses[1]]["HF_HUB_TOKEN_RO"] is None
        launch.kill()
        launch.wait()
        # What is left of the head's host has the launch's environment; of the other one, nothing is left.
        until = time.monotonic() + 60
        while beyond := [process for process in left(tmp_path) if "HOSTS" not in process.environ()]:
            assert time.monotonic() < until, [process.cmdline() for process in beyond]
            time.sleep(0.2)
        assert victim.poll() is None
        assert planted.read_text() == f"{victim.pid}\n"
    finally:
        watched.over.set()
        watched.join()
        victim.kill()
        victim.wait()
        planted.unlink(missing_ok=True)
    assert any(b"--address=" in line for line in watched.lines)  # else it saw nothing
    for secret in (NAMED, IN_A_URL):
        assert not [line for line in watched.lines if secret.encode() in line]
