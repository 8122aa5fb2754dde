"""A folder of a run that holds anything, outputs that take nothing, and children that are no processes of the run."""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.site_dir import Site
from ultra_patches import untrusted
from ultra_patches.core.gate import State
from ultra_patches.core.ledger import PatchStatus
from ultra_patches.report import run_dir as run_report
from ultra_patches.run_dir import writer
from ultra_patches.untrusted import shown

LIBRARIES = ("packaging", "rich", "markdown_it", "mdurl", "pygments")


def good() -> dict[str, Any]:
    """The content of a file, as a process writes it."""
    rows = [
        PatchStatus(f"p{n}", "t", "json", "0.20.0", State.APPLIED, "same source as in 0.20.0", (), 0, os.getpid())
        for n in range(22)
    ]
    with tempfile.TemporaryDirectory() as folder:
        assert writer.write(folder, rows, host="node1") is None
        (path,) = Path(folder).iterdir()
        return dict(json.loads(path.read_text()))


GOOD = good()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "site", tmp_path)
    made.library(*LIBRARIES)
    return made


def with_field(key: str, value: str) -> str:
    """A good file with other JSON text, which need not be JSON, at one place."""
    return json.dumps({**GOOD, key: "HERE"}).replace('"HERE"', value)


#: What is no file of a process, and is said in one line.
BROKEN = {
    **{f"pid {value}": with_field("pid", value) for value in ("NaN", "Infinity", "1e999", "9" * 5000, "true", "-1", "1.5", '"7"', "[]", "null", "1e400")},
    **{f"rank {value}": with_field("rank", value) for value in ("-Infinity", "{}", "0.5", "18446744073709551616")},
    **{f"host {value}": with_field("host", value) for value in ("1", "null", '{"a": 1}', '["node1"]')},
    **{f"patches {value}": with_field("patches", value) for value in ("[]", "7", '{"p": 1}', '{"p": {"state": "applied"}}', '{"p": {"upstream": [], "state": "", "reason": ""}}')},
    **{f"upstreams {value}": with_field("upstreams", value) for value in ('"vllm"', '{"vllm": {}}', '{"vllm": {"version": [1], "imported": true}}')},
    **{f"children {value}": with_field("children", value) for value in ("1", "[1]", '[{"pid": 1}]', '[{"pid": Infinity, "name": "x"}]')},
    **{f"launched {value}": with_field("launched", value) for value in ("1", "[1]", '{"rank": 0, "world": 1e999, "at": "x"}', '{"rank": 0}')},
    **{f"format {value}": with_field("format", value) for value in ("NaN", "[]", '"one"', "null", "-1")},
    "empty": "", "begun": '{"format": 1', "no object": "[1]", "deep": "[" * 200_000, "deep objects": '{"a":' * 100_000,
    "zeros": "\0" * 100, "text": "hello",
}  # fmt: skip


def fill(folder: Path) -> dict[str, str]:
    """Every kind of entry that may lie in a folder: its name, as it is shown, and what is said of it."""
    said: dict[str, str] = {}
    for number, text in enumerate(BROKEN.values()):
        (folder / f"broken-{number}.json").write_text(text)
        said[f"broken-{number}.json"] = "is no whole file of ultra-patches"
    for name, content in ((b"bytes-\xff.json", b"{"), (b"line\nbreak.json", b"{"), (b"\x1b[2Jescape.json", b"{"), ("\u202e.json".encode(), b"{"), (b"utf16.json", json.dumps(GOOD).encode("utf-16")[:-1]), (b"latin.json", b'{"host": "\xff"}')):  # fmt: skip
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(content)
        said[shown(os.fsdecode(name))] = "is no whole file of ultra-patches"
    os.mkfifo(folder / "pipe.json")
    os.mkfifo(folder / "pipe")
    (folder / "to-pipe.json").symlink_to(folder / "pipe")
    for device in ("zero", "random", "tty", "null"):
        (folder / f"{device}.json").symlink_to(f"/dev/{device}")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket.json"))
    listening.close()
    for name in ("pipe", "to-pipe", "zero", "random", "tty", "null", "socket"):
        said[f"{name}.json"] = "cannot be read: Not a regular file"
    (folder / "folder.json").mkdir()
    said["folder.json"] = "cannot be read: Is a directory"
    (folder / "loop.json").symlink_to("loop.json")
    said["loop.json"] = "cannot be read: Too many levels of symbolic links"
    with (folder / "giant.json").open("wb") as file:
        file.truncate(1 << 42)
    said["giant.json"] = "cannot be read: File too large"
    (folder / "gone.json").symlink_to(folder / "nothing")  # as one that is deleted between listing and reading
    return said


def test_a_folder_that_holds_anything(site: Site, tmp_path: Path, record_property: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    said = fill(folder)
    times = {"2": "9999-99-99T99:99:99Z", "3": "-292277022399-01-01T00:00:00Z", "4": "\x1b]0;title\x07"}
    for pid, when in times.items():
        path = folder / f"node-{pid}--7.json"
        path.write_text(json.dumps({**GOOD, "pid": int(pid), "time": when}))
        os.utime(path, (-(10**9), 10**11) if pid == "2" else (0, -1))
    names = {"host": "\x1b[31mred\x1b[0m", "role": "a\nb\u202e\ud800", "overlay": "[/bold]", "pid": 5}
    reason = {**GOOD["patches"]["p0"], "state": "failed", "reason": "\x1b[2J[/x] \udcff"}
    odd = {
        **GOOD,
        **names,
        "patches": {"p0": reason, "\x07": reason},
        "launched": {"rank": 7, "world": 10**15, "at": "x"},
    }
    (folder / "odd.json").write_text(json.dumps(odd))
    began = time.monotonic()
    ended = site.start("-m", "ultra_patches", "status", "--run-dir", str(folder))
    assert time.monotonic() - began < 30
    assert ended.code == 1
    record_property("tried", [len(said) + len(times) + 1, len(said)])
    lines = ended.stderr.splitlines()
    for name, what in said.items():
        assert [line for line in lines if line == f"ultra-patches: {name} {what}"], name
    assert all(line.startswith("ultra-patches: ") for line in lines)
    assert (ended.stdout + ended.stderr).replace("\n", "").isprintable()
    rows = ended.stdout.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [[shown(names["host"]), "5"], *(["node1", pid] for pid in times)]
    assert any("rank 0, 1, 2, 3, 4, 5, 6, 8 and 999999999999991 more of 1000000000000000" in line for line in lines)
    again = site.start("-m", "ultra_patches", "status", "--run-dir", str(folder), "--json")
    assert (again.code, again.stderr) == (1, "")
    assert len(json.loads(again.stdout, parse_constant=pytest.fail)["processes"]) == 4


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["applied", "failed", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_file_with_anything_at_one_place_is_read_or_named(data: st.DataObject) -> None:
    content = copy.deepcopy(GOOD)
    owner: Any = content
    while True:
        key = data.draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
        if not isinstance(owner[key], dict | list) or not owner[key] or data.draw(st.booleans()):
            break
        owner = owner[key]
    owner[key] = data.draw(JUNK)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.json").write_text(json.dumps(content))
        Path(folder, "b.json").write_text(json.dumps(GOOD))
        form = content.get("format")
        if isinstance(form, int) and not isinstance(form, bool) and 0 <= form < 1 << 63 and form != 1:
            with pytest.raises(run_report.UltraPatchesError, match="read it with ultra-patches"):
                run_report.read(folder)
            return
        run = run_report.read(folder)
        assert len(run.processes) + len(run.broken) == 2
        for line in [*run_report.problems(run), *(cell for row in run_report.table(run) for cell in row)]:
            assert shown(line).isprintable()


def test_ten_thousand_processes_take_seconds(tmp_path: Path, site: Site) -> None:
    """3 s on an idle machine, with every third process unlike the others; twice the 5 s that it may take on a busy one."""
    text = {kind: json.dumps({**GOOD, "pid": 4711_000_000, "patches": {**GOOD["patches"], "p3": {**GOOD["patches"]["p3"], "state": kind}}}) for kind in ("applied", "disabled")}  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    for pid in range(10_000):
        mine = text["applied" if pid % 3 else "disabled"].replace("4711000000", str(pid))
        (folder / f"node-{pid}-1.json").write_text(mine)
    before = os.times()
    ended = site.start("-m", "ultra_patches", "status", "--run-dir", str(folder))
    after = os.times()
    assert ended.code == 1
    assert len(ended.stdout.splitlines()) == 10_001
    assert len(ended.stderr.splitlines()) == 3334
    assert after.children_user - before.children_user + after.children_system - before.children_system < 10


@pytest.mark.parametrize("how", ["fork", "preexec_fn", "spawn", "pty", "vfork"])
def test_a_child_that_is_another_program_is_no_process_of_the_run(site: Site, tmp_path: Path, how: str) -> None:
    program = f"""
        import os, pty, subprocess, sys
        if sys.argv[1] == "on":
            import ultra_patches
        code = [sys.executable, "-S", "-c", "print('child')"]
        if {how!r} == "fork":
            if os.fork() == 0:
                print("child", flush=True)
                os._exit(0)
            os.wait()
        elif {how!r} == "spawn":
            os.spawnv(os.P_WAIT, sys.executable, code)
        elif {how!r} == "pty":
            pty.spawn(code)
        else:
            options = {{"preexec_fn": lambda: os.setsid()}} if {how!r} == "preexec_fn" else {{}}
            print(subprocess.run(code, capture_output=True, text=True, **options).stdout, end="")
        print(os.getpid())
        """
    path = site.write("program", program)
    folder = tmp_path / "run"
    for overlay in ("off", "on"):
        done = subprocess.run(
            [sys.executable, "-S", str(path), overlay],
            env=site.environment({"ULTRA_PATCHES_RUN_DIR": str(folder)}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split()[0] == "child", "with the overlay and without, the program does what it does"
    pids = {process.pid for process in run_report.read(folder).processes}
    assert len(pids) == (2 if how == "fork" else 1)
    assert int(done.stdout.split()[-1]) in pids


COMMANDS = {
    "status": ["status"],
    "run-dir": ["status", "--run-dir", "run"],
    "run-dir as JSON": ["status", "--run-dir", "run", "--json"],
    "explain": ["explain", "vllm-ipc-rank-layout"],
    "retire": ["retire"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_takes_nothing_changes_no_answer(site: Site, tmp_path: Path, command: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.json").write_text(json.dumps({**GOOD, "host": "knoten-ä-\ud800", "role": "→"}))
    python = f"{sys.executable} -S -m ultra_patches {' '.join(COMMANDS[command])}"

    def ended(redirection: str, **environment: str) -> tuple[int, bytes]:
        env = {**site.environment(), "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "", **environment}
        shell = ["bash", "-c", f"{python} {redirection}"]
        done = subprocess.run(shell, env=env, cwd=tmp_path, capture_output=True, timeout=60, check=False)
        assert b"Traceback" not in done.stderr + done.stdout, done.stderr
        return done.returncode, done.stdout

    code, text = ended("")
    assert text
    assert code == 0
    assert ended("", PYTHONIOENCODING="ascii:strict")[0] == code
    assert ended(">&- 2>&-")[0] == code
    assert ended(">/dev/full")[0] == 74
    if command != "run-dir":
        return
    assert ended("", PYTHONIOENCODING="latin-1:strict")[0] == code
    assert ended("", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")[0] == code
    assert ended(">&-")[0] == code
    assert ended("2>&-")[0] == code
    assert ended(">/dev/full 2>&1")[0] == 74
    assert ended("| true; exit ${PIPESTATUS[0]}", PYTHONUNBUFFERED="1")[0] in (141, code)


def test_who_reads_and_leaves_is_told_nothing(site: Site) -> None:
    """Enough output that the pipe is full when its reader goes."""
    shell = f"{sys.executable} -S -m ultra_patches status --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    environment = site.environment({"PYTHONUNBUFFERED": "1"})
    done = subprocess.run(
        ["bash", "-c", shell], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode in (0, 141), done.stderr) == (True, "")


def test_a_file_that_grows_is_read_to_the_limit_only(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b" " * untrusted.LIMIT_BYTES)
    assert len(untrusted.read(path)) == untrusted.LIMIT_BYTES
    with path.open("ab") as file:
        file.write(b" ")
    with pytest.raises(OSError, match=re.escape("File too large")):
        untrusted.read(path)


def test_rows_that_cannot_be_written_end_no_program(tmp_path: Path) -> None:
    row = PatchStatus("p", "t", "json", "1", State.APPLIED, b"\xff", (), 0, 1)  # type: ignore[arg-type]
    folder = tmp_path / "run"
    folder.mkdir()
    said = writer.write(folder, [row])
    assert said is not None
    assert said.startswith(f"ULTRA_PATCHES_RUN_DIR={str(folder)!r} cannot be written (")
    assert not list(folder.iterdir())
