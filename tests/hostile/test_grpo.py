"""A run of the GRPO example that fails: its own error is told, and what can be gone on from. No engine is started here."""

import contextlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytest.importorskip("omegaconf")
pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")

import torch

from examples.errors import RunError
from examples.grpo import checkpoint, data, report, train
from examples.grpo.policy import Policy
from tests.hostile.full_disk import limited
from tests.nemotron_ultra.conftest import ROOT

# TensorBoard's own thread, which has no room either where the disk is full.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

ROW = {"phase": "grpo", "step": 0, "reward": 0.5, "sync_s": 1.0}


class Actors:
    """Stands where Ray's actors would be, which are not under test: each call answers, or fails as it is told to."""

    def __init__(self, **failures: str) -> None:
        self.failures, self.engines = failures, []

    def train(self, method: str, *_: Any) -> list[Any]:
        return self.on_trainers(method)

    def on_trainers(self, method: str, *_: Any, **__: Any) -> list[Any]:
        if method in self.failures:
            raise RunError(self.failures[method])
        return [{"loss": 1.0}]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run with a step of metrics and two checkpoints."""
    for step in (10, 20):
        checkpoint.folder(tmp_path / "run", step).mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path / "run"


@pytest.fixture
def run(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command on the CPU preset with such actors; gives its status and what it says."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    keys = [f"model={tmp_path / 'model'}", f"out={out}"]
    for key in ("data", "eval_data", "sft.data"):
        (tmp_path / key).write_text('{"question": "a", "answer": "#### 1"}\n')
        keys.append(f"{key}={tmp_path / key}")
    problems = [data.Problem("a", "#### 1")]
    tokens = SimpleNamespace(encode=lambda *_, **__: [1], eos_token_id=2, apply_chat_template=lambda *_, **__: [1])
    monkeypatch.setattr(train.data, "inputs", lambda _: data.Inputs(tokens, problems, problems, problems))

    def command(actors: Actors) -> tuple[int, str]:
        monkeypatch.setattr(train.cluster, "start", lambda *_, **__: contextlib.nullcontext(actors))
        status = train.main([str(ROOT / "examples" / "grpo" / "cpu.yaml"), *keys])
        return status, capsys.readouterr().err

    return command


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def test_a_checkpoint_that_could_not_be_loaded_is_not_called_whole(run: Any, out: Path) -> None:
    status, said = run(Actors(load="trainer rank 0 failed: UnpicklingError: cut short"))
    assert status == 1
    assert errors(said) == ["error: trainer rank 0 failed: UnpicklingError: cut short"]
    assert "is whole" not in said
    folder = checkpoint.folder(out, 20)
    assert (
        f"The checkpoint after GRPO step 20 could not be loaded: run with the sizes that it was saved with, or move {folder} away"
        in said
    )
    assert said.rstrip().endswith("the same command goes on from step 10.")
    folder.rename(out / "away")
    assert run(Actors(load="again"))[1].rstrip().endswith("the same command begins anew.")


def test_what_fails_after_it_was_loaded_leaves_it_whole(run: Any) -> None:
    status, said = run(Actors(sync="the first error"))
    assert status == 1
    assert errors(said) == ["error: the first error"]
    assert "The checkpoint after GRPO step 20 is whole: the same command goes on from it." in said


def test_a_picture_that_cannot_be_drawn_hides_no_error(run: Any, out: Path) -> None:
    (out / "run.png").mkdir()
    status, said = run(Actors(sync="the first error"))
    assert status == 1
    assert errors(said) == ["error: the first error"]
    assert "no picture of this run: IsADirectoryError" in said


def test_a_full_disk_is_the_error_and_one_line(run: Any, out: Path) -> None:
    for step in (10, 20):
        checkpoint.folder(out, step).rmdir()
    size = (out / "metrics.jsonl").stat().st_size
    with limited(size):
        status, said = run(Actors())
    assert status == 1
    assert len(errors(said)) == 1, said
    assert "File too large" in errors(said)[0]
    assert "Traceback" not in said


def test_metrics_that_are_cut_anywhere_end_no_later_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.dumps(ROW) + "\n"
    last = json.dumps({**ROW, "step": 1}) + "\n"
    for cut in [*range(1, len(last), 5), len(last) - 2, len(last) - 1]:
        folder = tmp_path / str(cut)
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text(whole + last[:cut])
        with report.Report(folder) as progress:
            progress.step("grpo", 2, 3, {"reward": 1.0})
        steps = [row["step"] for row in report.read(folder)]
        assert steps == ([0, 2] if cut < len(last) - 1 else [0, 1, 2]), last[:cut]
        assert ("1 lines are no step, line 2 for one" in " ".join(capsys.readouterr().err.split())) == (len(steps) == 2)
    assert report.draw(folder).is_file()


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"7", b"null", b'{"step": 1}', b'{"phase": "grpo"}', b'{"phase": ["grpo"], "step": 1}', b"\xff\xfe", b"[" * 100_000,
     b'{"phase": "grpo", "step": 1, "reward": "high"}', b'{"phase": "grpo", "step": NaN}'],
    ids=range(11),
)  # fmt: skip
def test_a_line_that_is_no_step_is_passed_over(out: Path, line: bytes) -> None:
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert report.read(out) == [ROW]


@pytest.mark.parametrize("name", ["step-", "step-²", "step-007", "step--1", f"step-{'9' * 5000}", "step-1.5", "step-x"])
def test_a_folder_that_is_no_step_is_no_checkpoint(out: Path, name: str) -> None:
    with contextlib.suppress(OSError):  # a name that is too long
        (out / "checkpoints" / name).mkdir()
    assert checkpoint.saved(out) == [10, 20]


class Evil:
    """What a pickle may hold."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_reference_policy_is_read_without_running_what_is_in_it(tmp_path: Path) -> None:
    states = [{"w": torch.ones(2, dtype=torch.bfloat16), "layer._extra_state": io.BytesIO(b"fp8"), "none": None}]
    rank = SimpleNamespace(reference=states, rank=0)
    Policy.save_reference(rank, tmp_path)
    Policy.load_reference(rank, tmp_path)
    assert torch.equal(rank.reference[0]["w"], states[0]["w"])
    assert rank.reference[0]["layer._extra_state"].getvalue() == b"fp8"
    torch.save([{"w": Evil(tmp_path / "ran")}], tmp_path / "rank-0.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        Policy.load_reference(rank, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_nothing_in_the_tree_loads_more_than_weights() -> None:
    calls = [
        (path.name, line)
        for folder in ("ultra_patches", "compat", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
        for line in path.read_text().splitlines()
        if "torch.load(" in line
    ]
    assert calls
    assert [call for call in calls if "weights_only=True" not in call[1]] == []


@pytest.mark.parametrize(
    "line", [b'{"question": "\xff", "answer": "#### 1"}', b"[" * 100_000, b'{"question": 7, "answer": "#### 1"}',
             b'{"question": "a", "answer": 7}', b"9" * 9999],
    ids=range(5),
)  # fmt: skip
def test_a_dataset_that_is_none_names_the_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "a", "answer": "#### 1"}\n' + line + b"\n")
    with pytest.raises(RunError, match="line 2") as caught:
        data.load(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)
