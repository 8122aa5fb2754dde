"""Many real processes at one folder, killed and forked at any time: what is read is whole."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ultra_patches.report import run_dir as run_report

from .site_dir import PROJECT

TIMEOUT_S = 60
#: `rundir` without the overlay, which would arm itself: 200 processes are to start on two cores.
HEAD = f"""
import os, sys, types
package = types.ModuleType("ultra_patches")
package.__path__ = [{str(PROJECT / "ultra_patches")!r}]
package.__version__ = "0.1.0"
sys.modules["ultra_patches"] = package
from types import SimpleNamespace
from ultra_patches.report import run_dir as run_report
from ultra_patches.run_dir import writer as rundir

def rows(state="applied", reason="why"):
    value = SimpleNamespace(value=state)
    return [SimpleNamespace(id=f"p{{n}}", upstream="json", version="1.0", state=value, reason=reason) for n in range(8)]

folder = sys.argv[1]
"""


def start(code: str, *arguments: str, **options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", HEAD + textwrap.dedent(code), *arguments]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), **options}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (0, ""), out + err
    return out


def test_200_processes_write_while_a_reader_loops(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # Ten interpreters that fork nineteen children each: to start 200 would take most of the time.
    code = """
    import time
    children = []
    for _ in range(19):
        child = os.fork()
        if child == 0:
            children = None
            break
        children.append(child)
    for step in range(10):
        complaint = rundir.write(folder, rows("armed" if step % 2 else "applied", "x" * 2000 * step), host=sys.argv[2])
        assert complaint is None, complaint
        time.sleep(0.01)
    rundir.write(folder, rows(), host=sys.argv[2])
    for child in children or ():
        assert os.waitpid(child, 0)[1] == 0
    """
    started = [start(code, str(run), f"node{number % 2}") for number in range(10)]
    reads = 0
    while any(process.poll() is None for process in started):
        if any(run.glob("*.json")):
            assert run_report.read(run).broken == ()
            reads += 1
    for process in started:
        finish(process)
    report = run_report.read(run)
    assert reads > 3
    assert len(report.processes) == 200
    assert {process.host for process in report.processes} == {"node0", "node1"}
    assert run_report.problems(report) == []
    assert len(report.groups["json"]) == 1
    assert all(path.suffix == ".json" for path in run.iterdir())


def test_killed_while_it_writes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = """
    print("ready", flush=True)
    import itertools
    for step in itertools.count():
        rundir.write(folder, rows(reason="x" * (step % 7) * 9000))
    """
    chance = random.Random(7)
    for _ in range(8):
        processes = [start(code, str(run)) for _ in range(3)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            time.sleep(chance.uniform(0.001, 0.05))
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == -signal.SIGKILL
    report = run_report.read(run)
    assert report.broken == ()
    assert len(report.processes) > 12
    assert {path.suffix for path in run.iterdir()} <= {".json", ".tmp"}


def test_a_forked_child_writes_its_own(tmp_path: Path) -> None:
    code = """
    writer = rundir.Writer(folder, rows)
    assert writer.refresh() is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(os.getpid(), child)
    """
    parent, child = map(int, finish(start(code, str(tmp_path / "run"))).split())
    found = {process.pid: process.ppid for process in run_report.read(tmp_path / "run").processes}
    assert found == {parent: os.getpid(), child: parent}


def test_a_forked_child_of_multiprocessing_has_its_name_and_its_last_state(tmp_path: Path) -> None:
    code = """
    import multiprocessing
    now = ["armed"]
    writer = rundir.Writer(folder, lambda: rows(now[0]))
    writer.refresh()
    def work():
        now[0] = "applied"
    child = multiprocessing.get_context("fork").Process(target=work, name="VllmWorker-3")
    child.start()
    child.join()
    assert child.exitcode == 0
    """
    finish(start(code, str(tmp_path / "run"), RANK="0"))
    found = {p.role: (p.rank, p.patches["p0"][1]) for p in run_report.read(tmp_path / "run").processes}
    assert found == {"-c": (0, "armed"), "VllmWorker-3": (3, "applied")}


def test_a_child_forked_while_another_thread_writes(tmp_path: Path) -> None:
    code = """
    import threading, time
    writer = rundir.Writer(folder, rows)
    writer.refresh()
    done = threading.Event()
    def loop():
        while not done.is_set():
            writer.refresh()
    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            writer.refresh()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    done.set()
    for thread in threads:
        thread.join()
    """
    process = start(code, str(tmp_path / "run"))
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err  # Python 3.12 warns of the fork itself
    report = run_report.read(tmp_path / "run")
    assert (len(report.processes), report.broken) == (21, ())


def test_a_child_writes_although_a_thread_of_its_parent_was_at_it(tmp_path: Path) -> None:
    code = """
    import threading
    now, asked, answer = ["armed"], threading.Event(), threading.Event()
    def ask():
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            answer.wait()
        return rows(now[0])
    writer = rundir.Writer(folder, ask)
    writer.refresh()
    thread = threading.Thread(target=writer.refresh)
    thread.start()
    asked.wait()
    child = os.fork()
    if child == 0:
        now[0] = "applied"
        writer.refresh()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    answer.set()
    thread.join()
    print(child)
    """
    process = start(code, str(tmp_path / "run"))
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err  # Python 3.12 warns of the fork itself
    states = {p.pid: p.patches["p0"][1] for p in run_report.read(tmp_path / "run").processes}
    assert states == {process.pid: "armed", int(out): "applied"}


def test_the_last_state_is_written_at_exit_wherever_the_program_went(tmp_path: Path) -> None:
    code = """
    now = ["armed"]
    writer = rundir.Writer(folder, lambda: rows(now[0]))
    writer.refresh()
    now[0] = "applied"
    os.chdir("/")
    """
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", HEAD + textwrap.dedent(code), "run"],
        env={"PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
    )
    assert process.wait(TIMEOUT_S) == 0
    (read,) = run_report.read(tmp_path / "run").processes
    assert read.patches["p0"][1] == "applied"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(
    ("title", "role"),
    [("VLLM::EngineCore_DP0", "VLLM::EngineCore_DP0"), ("ray::Trainer.step", "ray::Trainer"), ("python", "-c")],
)
def test_the_role_is_the_title_that_the_process_gave_itself(tmp_path: Path, title: str, role: str) -> None:
    done = subprocess.run(
        [title, "-S", "-c", HEAD + "rundir.write(folder, rows())", str(tmp_path / "run")],
        executable=sys.executable,
        env={"PYTHONPATH": str(PROJECT), "PYTHONHOME": sys.base_prefix},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0
    assert [process.role for process in run_report.read(tmp_path / "run").processes] == [role]


def test_a_program_is_called_by_its_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + "rundir.write(folder, rows())")
    run = tmp_path / "run"
    for command in ([str(script)], ["-m", "train"]):
        subprocess.run(
            [sys.executable, "-S", *command, str(run)],
            env={"PYTHONPATH": os.pathsep.join([str(PROJECT), str(tmp_path)])},
            timeout=TIMEOUT_S,
            check=True,
        )
    assert [process.role for process in run_report.read(run).processes] == ["train.py", "train.py"]


def test_a_stopped_writer_writes_no_more(tmp_path: Path) -> None:
    code = """
    now = ["armed"]
    writer = rundir.Writer(folder, lambda: rows(now[0]))
    writer.refresh()
    writer.stop()
    now[0] = "applied"
    writer.refresh()
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    """
    finish(start(code, str(tmp_path / "run")))
    (read,) = run_report.read(tmp_path / "run").processes
    assert read.patches["p0"][1] == "armed"


def test_rows_that_ask_for_a_refresh_themselves(tmp_path: Path) -> None:
    code = """
    asked = []
    def ask():
        asked.append(1)
        if len(asked) == 1:
            writer.refresh()
        return rows()
    writer = rundir.Writer(folder, ask)
    writer.refresh()
    print(len(asked))
    """
    assert finish(start(code, str(tmp_path / "run"))).strip() == "2"


def test_a_folder_that_may_not_be_written_gives_one_line(tmp_path: Path) -> None:
    # Root may write anywhere but under /proc.
    code = "print(rundir.write(folder, rows()))"
    read_only = tmp_path / "run"
    read_only.mkdir()
    read_only.chmod(0o500)
    for folder in ("/proc/1/run", *([str(read_only)] if os.getuid() else [])):
        (line,) = finish(start(code, folder)).splitlines()
        assert line.startswith(f"ULTRA_PATCHES_RUN_DIR={folder!r} cannot be written (")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_full_disk_leaves_the_file_before_it(tmp_path: Path) -> None:
    # A limit on the size of files fails in the middle of a write, as a full disk does.
    code = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    assert rundir.write(folder, rows()) is None
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    print(rundir.write(folder, rows(reason="x" * 100000)))
    """
    run = tmp_path / "run"
    assert "File too large" in finish(start(code, str(run)))
    assert [path.suffix for path in run.iterdir()] == [".json"]
    assert json.loads(next(run.iterdir()).read_text())["patches"]["p0"]["reason"] == "why"
