"""Runs of the GRPO example on the CPU preset, as a user starts them, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MARK = "GRPO_TEST_RUN"
#: Beside other tests, a raylet takes longer than Ray's 30 s to start, and workers at Ray's niceness of 15 get no processor.
RAY_ENVIRONMENT = {"RAY_raylet_start_wait_time_s": "240", "RAY_worker_niceness": "0"}

#: The files of each preset, by the key that names them.
FILES = {
    "cpu": {"model": "model", "data": "train.jsonl", "eval_data": "eval.jsonl", "sft.data": "sft.jsonl"},
    "cpu_lora": {"model": "base", "data": "train.jsonl", "eval_data": "eval.jsonl"},
}


def command(files: Path, out: Path, *arguments: str, preset: str = "cpu") -> list[str]:
    """A preset on these files."""
    paths = [f"{key}={files / name}" for key, name in FILES[preset].items()]
    script = [sys.executable, "-m", "examples.grpo.train", f"examples/grpo/{preset}.yaml"]
    return [*script, *paths, f"out={out}", *arguments]


def environment(out: Path, **extra: str) -> dict[str, str]:
    """A mark that every process of the run inherits, by which what is left of it can be found."""
    return {**os.environ, **RAY_ENVIRONMENT, MARK: str(out), "HF_HUB_OFFLINE": "1", **extra}


def left(out: Path) -> list[str]:
    """The processes of a run that still live."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(out) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:80])
        except psutil.Error:
            continue
    return found


def assert_all_ended(out: Path) -> None:
    """Some seconds are Ray's own, for its daemons."""
    until = time.monotonic() + 30
    while (alive := left(out)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not alive


def run(files: Path, out: Path, *arguments: str, preset: str = "cpu", **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, however it ends, and see that nothing of it goes on."""
    found = subprocess.run(
        command(files, out, *arguments, preset=preset),
        check=False,
        cwd=ROOT,
        env=environment(out, **extra),
        capture_output=True,
        text=True,
    )
    assert_all_ended(out)
    return found


def metrics(out: Path, phase: str = "grpo") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == phase]


def error(found: subprocess.CompletedProcess[str]) -> str:
    """The one error of a run that failed."""
    assert found.returncode == 1, found.stderr
    assert "Traceback" not in found.stderr
    lines = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, found.stderr
    return lines[0]


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        if (out / "metrics.jsonl").exists() and any(row["step"] >= step for row in metrics(out)):
            return
        time.sleep(0.2)
    pytest.fail(f"step {step} was not reached; exit status {process.poll()}")


def kill(out: Path, title: str) -> None:
    """Kill -9 the first process of the run whose command line has the title."""
    import psutil

    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == str(out)
            if ours and title in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                return
        except psutil.Error:
            continue
    pytest.fail(f"no process {title}: {left(out)}")
