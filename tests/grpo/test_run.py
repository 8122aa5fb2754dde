"""The GRPO example as a user runs it: two trainer ranks, a vLLM engine and Ray, on the CPU preset.

One whole run comes first; the others go on from its checkpoints, or start with a few supervised steps.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grpo.running import ROOT, assert_all_ended, command, environment, error, kill, metrics, run, wait_for_step

for needed in ("psutil", "ray", "vllm", "megatron.bridge"):
    pytest.importorskip(needed.partition(".")[0])

PATCH = "vllm-cpu-moe-prepack"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


def test_the_reward_rises_and_both_sides_agree_after_every_sync(whole: Path) -> None:
    rows = metrics(whole)
    # Means of ten, as a step's reward varies by 0.05. How fast it rises depends on the processor's bf16 arithmetic.
    first, last = (sum(row["reward"] for row in part) / 10 for part in (rows[:10], rows[-10:]))
    assert first < 0.6
    assert last > 0.65
    assert last - first >= 0.25
    evals = [row["eval"] for row in rows if "eval" in row]
    assert evals[-1] > first + 0.15
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(0 < row["dlogp_after"] < 0.05 for row in rows)
    assert all(row["dlogp_rollout"] < 0.05 for row in rows)
    # The weights moved, and the sync is what brought the sides together.
    assert sum(row["dlogp_before"] for row in rows) > 1.5 * sum(row["dlogp_after"] for row in rows)
    assert (whole / "run.png").stat().st_size > 20_000
    assert list((whole / "tensorboard").iterdir())


def test_without_the_patch_the_run_refuses_and_unsafe_shows_the_damage(
    resumed: Callable[[int], Path], files: Path, whole: Path
) -> None:
    out = resumed(20)
    refused = error(run(files, out, "grpo.steps=22", ULTRA_PATCHES_DISABLE=PATCH))
    assert PATCH in refused
    assert "ULTRA_PATCHES_DISABLE" in refused
    damaged = run(files, out, "grpo.steps=22", "--unsafe", ULTRA_PATCHES_DISABLE=PATCH)
    assert damaged.returncode == 0, damaged.stderr
    for row in metrics(out):
        assert row["dlogp_after"] > 0.5
        assert row["reward"] < 0.5 * metrics(whole)[int(row["step"])]["reward"]


#: A run that does not look for its patches, and does stop where both sides differ.
UNLOOKED = """
import ultra_patches, sys
from pathlib import Path
from examples.grpo import cluster, data, report, train
from examples.grpo.config import load
config = load(Path(sys.argv[1]), sys.argv[2:])
with report.Report(config.out) as progress, cluster.start(config, require=False) as actors:
    try:
        train.Run(config, data.inputs(config), actors, progress, unsafe=False).run()
    except train.RunError as error:
        print(error)
"""


def test_the_diagnosis_names_the_weights_that_did_not_arrive(resumed: Callable[[int], Path], files: Path) -> None:
    out = resumed(20)
    script = [sys.executable, "-c", UNLOOKED, *command(files, out)[3:]]
    found = subprocess.run(
        script,
        check=True,
        cwd=ROOT,
        env=environment(out, ULTRA_PATCHES_DISABLE=PATCH),
        capture_output=True,
        text=True,
    )
    assert_all_ended(out)
    assert "are not those that were sent" in found.stdout
    named = found.stdout.partition("that were sent: ")[2].partition(".")[0:3]
    assert "experts" in "".join(named)
    fresh = re.search(r"started on the same export differs by ([0-9.]+);", found.stdout)
    assert fresh
    assert float(fresh[1]) < 0.05


def test_a_run_that_is_killed_goes_on_from_its_checkpoint(
    resumed: Callable[[int], Path], files: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    out = resumed(10)
    process = started(out, "save_every=2", "grpo.steps=20")
    wait_for_step(out, 12, process)
    process.kill()
    process.wait()
    assert_all_ended(out)
    kept = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert "step-12" in kept
    seen = len(metrics(out))
    found = run(files, out, "save_every=2", "grpo.steps=15")
    assert found.returncode == 0, found.stderr
    after = re.search(r"resumed after GRPO step (\d+)", found.stderr)
    assert after
    assert int(after[1]) >= 12
    rest = metrics(out)[seen:]
    assert [row["step"] for row in rest] == list(range(int(after[1]), 15))


def test_a_resumed_run_repeats_what_the_whole_one_did(resumed: Callable[[int], Path], files: Path, whole: Path) -> None:
    out = resumed(10)
    assert run(files, out, "grpo.steps=11").returncode == 0
    again, before = metrics(out)[0], metrics(whole)[10]
    assert again["step"] == before["step"] == 10
    assert again["reward"] == pytest.approx(before["reward"], abs=0.1)
    # The schedule is the checkpoint's, not that of a run of 11 steps.
    assert again["lr"] == pytest.approx(before["lr"], rel=1e-6)


def test_on_resume_the_schedule_of_the_file_wins_where_it_is_wanted(
    resumed: Callable[[int], Path], files: Path
) -> None:
    out = resumed(10)
    keys = {"lr": "1e-4", "min_lr": "1e-4", "override_on_resume": "true"}
    found = run(files, out, "grpo.steps=11", *(f"grpo.schedule.{key}={value}" for key, value in keys.items()))
    assert found.returncode == 0, found.stderr
    assert metrics(out)[0]["lr"] == pytest.approx(1e-4)


def test_a_reference_policy_two_engines_and_several_updates_a_step_go_on_after_a_resume(
    files: Path, tmp_path: Path
) -> None:
    keys = (
        "sft.steps=5",
        "rollout.engines=2",
        "grpo.kl=0.5",
        "grpo.updates=2",
        "rollout.temperature=0.7",
        "save_every=1",
    )
    out = tmp_path / "run"
    first = run(files, out, *keys, "grpo.steps=1")
    assert first.returncode == 0, first.stderr
    second = run(files, out, *keys, "grpo.steps=2")
    assert second.returncode == 0, second.stderr
    rows = metrics(out)
    assert [row["step"] for row in rows] == [0, 1]
    # At another temperature too, the trainer gives what it gets the log-probabilities that they were drawn with.
    assert all(row["dlogp_rollout"] < 0.05 and row["dlogp_after"] < 0.05 for row in rows)
    shutil.rmtree(out / "reference")
    assert "began without it" in error(run(files, out, *keys, "grpo.steps=3"))


@pytest.mark.parametrize(
    ("title", "name"), [("VLLM::EngineCore", "rollout engine"), ("ray::TrainerActor", "trainer rank")]
)
def test_a_process_that_dies_ends_the_run_with_one_line(
    resumed: Callable[[int], Path], started: Callable[..., subprocess.Popen[str]], title: str, name: str
) -> None:
    out = resumed(10)
    process = started(out)
    wait_for_step(out, 10, process)
    kill(out, title)
    _, text = process.communicate(timeout=200)
    found = subprocess.CompletedProcess([], process.returncode, "", text)
    assert name in error(found)
    assert "The checkpoint after GRPO step 10 is whole" in text
    assert_all_ended(out)
    assert (out / "checkpoints" / "step-10" / "metadata.json").is_file()


def test_a_sync_that_times_out_ends_the_run_with_one_line(resumed: Callable[[int], Path], files: Path) -> None:
    found = run(files, resumed(10), "sync.timeout_s=0.001")
    assert "sync.timeout_s" in error(found)


def test_what_is_wrong_in_a_file_is_told_before_anything_starts(files: Path, tmp_path: Path) -> None:
    bare = tmp_path / "files"
    shutil.copytree(files, bare)
    with (bare / "sft.jsonl").open("a") as lines:
        lines.write('{"question": "1+1?"}\n')
    assert "sft.jsonl, line" in error(run(bare, tmp_path / "run"))
    (bare / "model" / "chat_template.jinja").unlink()
    assert "has no chat template" in error(run(bare, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
