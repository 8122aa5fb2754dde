"""What a process writes, and what is told of a folder with the files of many."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.core.gate import State
from ultra_patches.core.ledger import PatchStatus
from ultra_patches.errors import UltraPatchesError
from ultra_patches.report import run_dir as run_report
from ultra_patches.report.run_dir import RunFolder
from ultra_patches.run_dir import writer as rundir
from ultra_patches.run_dir.record import IN_FORCE, Process

STATES = [state.value for state in State]
_numbers = itertools.count(1)


def status(patch_id: str = "p", state: State = State.APPLIED, version: str | None = "0.20.0") -> PatchStatus:
    # `json` stands for an upstream that is imported, `toy-absent` for one that is not.
    return PatchStatus(patch_id, "t", "json", version, state, "why", (), 0, os.getpid())


def process(states: dict[str, str] | None = None, **fields: Any) -> Process:
    number = next(_numbers)
    given: dict[str, Any] = {
        "file": f"{number}.json",
        "host": "node1",
        "pid": number,
        "ppid": 1,
        "rank": 0,
        "role": "Worker",
        "python": "3.12.1",
        "overlay": "0.1.0",
        "time": "2026-01-01T00:00:00Z",
        "imported": {"vllm": "0.20.0"},
        "installed": {"vllm": "0.20.0"},
        "patches": {name: ("vllm", state, "why") for name, state in (states or {"p": "applied"}).items()},
    }
    return Process(**{**given, **fields})


def test_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    absent = PatchStatus("q", "t", "toy-absent", None, State.NOT_INSTALLED, "not there", (), 0, os.getpid())
    ready = PatchStatus("r", "t", "toy-ready", "2.0", State.ARMED, "same", (), 0, os.getpid())
    assert rundir.write(tmp_path / "a" / "run", [status(), absent, ready], host="node/1") is None
    (file,) = (tmp_path / "a" / "run").iterdir()
    assert file.name.startswith(f"node_1-{os.getpid()}-")
    (read,) = run_report.read(tmp_path / "a" / "run").processes
    assert (read.host, read.pid, read.ppid, read.rank) == ("node/1", os.getpid(), os.getppid(), 3)
    assert read.patches == {
        "p": ("json", "applied", "why"),
        "q": ("toy-absent", "not-installed", "not there"),
        "r": ("toy-ready", "armed", "same"),
    }
    assert (read.imported, read.installed) == ({"json": "0.20.0"}, {"json": "0.20.0", "toy-ready": "2.0"})
    assert json.loads(file.read_text())["digest"] == {"json": read.digest("json", {})}


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    rundir.write(tmp_path, [status(state=State.ARMED)])
    rundir.write(tmp_path, [status()])
    (read,) = run_report.read(tmp_path).processes
    assert read.patches["p"][1] == "applied"
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_two_hosts_with_the_same_pid_lie_side_by_side(tmp_path: Path) -> None:
    rundir.write(tmp_path, [status()], host="node1")
    rundir.write(tmp_path, [status(state=State.DISABLED)], host="node2")
    report = run_report.read(tmp_path)
    assert [p.host for p in report.processes] == ["node1", "node2"]
    (line,) = run_report.differences(report)
    assert line.startswith(f"node2 pid {os.getpid()} rank ")
    assert line.endswith(": p disabled (why), in force in 1 of 2")


@pytest.mark.parametrize("rank", ["", "x", "-1", "٣"])
def test_a_rank_that_is_no_number_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    rundir.write(tmp_path, [])
    assert run_report.read(tmp_path).processes[0].rank is None


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "\0"):
        complaint = rundir.write(folder, [status()])
        assert complaint is not None
        assert complaint.startswith(f"ULTRA_PATCHES_RUN_DIR={str(folder)!r} cannot be written (")
        assert "\n" not in complaint
    with pytest.raises(UltraPatchesError, match="cannot be read: Not a directory"):
        run_report.read(tmp_path / "file")


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(UltraPatchesError, match="cannot be read: No such file"):
        run_report.read(tmp_path / "none")
    (tmp_path / ".node-1-1.json.1.0.tmp").write_text("{")
    with pytest.raises(UltraPatchesError, match=r"no process wrote to .*: set ULTRA_PATCHES_RUN_DIR"):
        run_report.read(tmp_path)


def test_another_format(tmp_path: Path) -> None:
    (tmp_path / "node-1-1.json").write_text(json.dumps({"format": 2, "overlay": "9.0"}))
    with pytest.raises(UltraPatchesError, match=r"has format 2, not 1: read it with ultra-patches 9\.0") as caught:
        run_report.read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format": 1}', "\xff", "[" * 100_000])
def test_what_is_no_whole_file_is_named(tmp_path: Path, text: str) -> None:
    rundir.write(tmp_path, [status()])
    (tmp_path / "node-1-1.json").write_bytes(text.encode("latin-1"))
    report = run_report.read(tmp_path)
    assert len(report.processes) == 1
    assert report.broken == ("node-1-1.json is no whole file of ultra-patches",)
    assert run_report.problems(report) == list(report.broken)


def test_every_beginning_of_a_file_is_broken(tmp_path: Path) -> None:
    rundir.write(tmp_path, [status()])
    (file,) = tmp_path.glob("*.json")
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        assert not run_report.read(tmp_path).processes


def test_a_folder_called_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    assert run_report.read(tmp_path).broken == ("a.json cannot be read: Is a directory",)


def test_a_patch_that_is_not_declared() -> None:
    report = RunFolder((process(), process(), process({"q": "applied"}, host="node2", pid=9, rank=None, role="API")))
    assert run_report.differences(report) == [
        "node2 pid 9 rank - (API): p not declared, in force in 2 of 3",
        "node2 pid 9 rank - (API): q in force (why), not declared in 2 of 3",
    ]


def test_a_patch_that_one_waits_with_and_the_other_does_not_know() -> None:
    report = RunFolder((process({"p": "applied"}, pid=9), process({"p": "applied", "q": "armed"})))
    assert run_report.differences(report) == ["node1 pid 9 rank 0 (Worker): q not declared, in force in 1 of 2"]


def test_other_versions() -> None:
    other = process({"p": "not-needed"}, pid=9, imported={"vllm": "0.33.0"})
    older = process(pid=8, overlay="0.0.9")
    assert run_report.differences(RunFolder((process(), process(), other, older))) == [
        "node1 pid 9 rank 0 (Worker): vllm 0.33.0, 0.20.0 in 3 of 4",
        "node1 pid 8 rank 0 (Worker): ultra-patches 0.0.9, 0.1.0 in 3 of 4",
    ]


def test_who_has_not_imported_it_is_not_asked() -> None:
    launcher = process({"p": "disabled"}, imported={}, overlay="0.0.1")
    assert run_report.problems(RunFolder((process(), launcher))) == []


def test_a_correction_that_is_nowhere_in_force() -> None:
    report = RunFolder((process({"p": "drifted"}, pid=7), process({"p": "drifted"})))
    assert run_report.differences(report) == []
    assert run_report.problems(report) == ["p drifted (why) in 2 processes, first node1 pid 7 rank 0 (Worker)"]


def test_the_table() -> None:
    first, second = process({"p": "applied", "q": "armed"}), process(imported={}, rank=None)
    rows = run_report.table(RunFolder((first, second)))
    assert all(len(row) == len(run_report.HEADINGS) for row in rows)
    assert rows[0][4:] == ("vllm 0.20.0", first.digest("vllm", {}), "1 armed, 1 in force")
    assert rows[1][2:6] == ("-", "Worker", "-", "-")


settled = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([s for s in STATES if s != "armed"]), min_size=1)
anything = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(STATES), min_size=1)


@given(settled, st.sets(st.sampled_from("abcd")), st.integers(1, 4))
def test_what_is_armed_differs_from_nothing(states: dict[str, str], armed: set[str], others: int) -> None:
    waiting = process({name: "armed" if name in armed else state for name, state in states.items()})
    report = RunFolder((waiting, *(process(states) for _ in range(others))))
    assert run_report.differences(report) == []
    assert len(report.groups["vllm"]) == 1


@given(st.lists(anything, min_size=1, max_size=6))
def test_one_digest_is_no_difference_and_the_other_way_round(all_states: list[dict[str, str]]) -> None:
    report = RunFolder(tuple(process(states) for states in all_states))
    assert (run_report.differences(report) == []) == (len(report.groups["vllm"]) == 1)
    assert all("\n" not in line for line in run_report.problems(report))


@given(st.lists(anything, min_size=1, max_size=6), st.randoms())
def test_the_order_of_processes_does_not_matter(all_states: list[dict[str, str]], random: Any) -> None:
    processes = [process(states) for states in all_states]
    shuffled = random.sample(processes, len(processes))
    one, other = RunFolder(tuple(processes)), RunFolder(tuple(shuffled))
    assert sorted(run_report.differences(one)) == sorted(run_report.differences(other))
    assert one.groups["vllm"].keys() == other.groups["vllm"].keys()


@given(settled, settled)
def test_the_digest_tells_kinds_apart(one: dict[str, str], other: dict[str, str]) -> None:
    first, second = process(one), process(other)
    kinds = [{name: p.kind(name) for name in p.patches} for p in (first, second)]
    assert (first.digest("vllm", {}) == second.digest("vllm", {})) == (kinds[0] == kinds[1])


@given(settled)
def test_late_is_in_force_and_the_release_counts(states: dict[str, str]) -> None:
    late = {name: "applied-late" if state == "applied" else state for name, state in states.items()}
    assert process(states).digest("vllm", {}) == process(late).digest("vllm", {})
    assert IN_FORCE in {process({"p": state}).kind("p") for state in ("applied", "applied-late")}
    for change in ({"imported": {"vllm": "0.21.0"}}, {"overlay": "0.2.0"}):
        assert process(states).digest("vllm", {}) != process(states, **change).digest("vllm", {})
