"""LoRA in the GRPO example: adapters alone are trained, kept and resumed, and what they do reaches the rollout merged."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.errors import RunError
from examples.grpo.config import load
from tests.grpo.running import ROOT, metrics, run

for needed in ("psutil", "ray", "vllm", "megatron.bridge"):
    pytest.importorskip(needed.partition(".")[0])

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def seen(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("case") / "files"
    shutil.copytree(files, folder)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.grpo.lora_case", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def test_adapters_alone_are_trained_and_exported_merged(seen: dict[str, Any]) -> None:
    # 16 x (inputs + outputs) of each linear layer: qkv and proj of three layers, one dense MLP, two shared and 16 other experts.
    attention = 3 * ((64 + 256) + (128 + 64))
    dense = (64 + 256) + (128 + 64)
    experts = 18 * ((64 + 128) + (64 + 64))
    assert f"LoRA: {16 * (attention + dense + experts):,} of " in seen["says"]
    assert seen["grad_norm"] > 0
    assert seen["training changes the policy"]
    assert seen["names"]
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert all(name.endswith(tuple(f".{kind}.weight" for kind in linear)) for name in seen["changed"])
    assert len(seen["changed"]) == 3 * 4 + 3 + 18 * 3


def test_the_reference_is_the_model_without_adapters(seen: dict[str, Any]) -> None:
    assert seen["adapters at the start change nothing"]
    assert seen["after the reference the adapters are back"]


def test_a_checkpoint_holds_the_adapters_and_gives_them_back(seen: dict[str, Any]) -> None:
    assert seen["the step after the checkpoint moved"]
    weights = [name for name in seen["in the checkpoint"] if name.startswith("decoder.")]
    assert weights
    assert all(".adapter." in name for name in weights)


@pytest.fixture(scope="module")
def base(files: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files with the supervised model as base, exported from the first checkpoint of the whole run."""
    out = tmp_path_factory.mktemp("base") / "run"
    shutil.copytree(whole / "checkpoints" / "step-0", out / "checkpoints" / "step-0")
    exported = files / "base"
    found = run(files, out, "grpo.steps=0", f"export={exported}")
    assert found.returncode == 0, found.stderr
    assert (exported / "chat_template.jinja").is_file()
    return files


def test_the_reward_rises_and_a_run_goes_on_from_its_adapters(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = run(base, out, "keep=100", "grpo.stop_reward=0.75", preset="cpu_lora")
    assert found.returncode == 0, found.stderr
    assert "parameters are trained" in found.stderr
    rows = metrics(out)
    assert rows[0]["reward"] < 0.6
    last = sum(row["reward"] for row in rows[-5:]) / 5
    assert last >= 0.7
    assert last - rows[0]["reward"] >= 0.3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(0 < row["dlogp_after"] < 0.05 for row in rows)
    assert sum(row["dlogp_before"] for row in rows) > 1.5 * sum(row["dlogp_after"] for row in rows)
    kept = out / "checkpoints" / "step-20"
    wanted = yaml.safe_load((kept / "run_config.yaml").read_text())["peft"]
    assert (wanted["dim"], wanted["alpha"]) == (16, 32)

    again = tmp_path / "again"
    shutil.copytree(kept, again / "checkpoints" / "step-20")
    found = run(base, again, "grpo.steps=21", f"export={tmp_path / 'merged'}", preset="cpu_lora")
    assert found.returncode == 0, found.stderr
    assert metrics(again)[0]["lr"] == pytest.approx(rows[20]["lr"], rel=1e-6)
    assert metrics(again)[0]["reward"] == pytest.approx(rows[20]["reward"], abs=0.1)
    # A plain checkpoint, without a name of an adapter in it.
    from safetensors import safe_open

    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as merged:
        names = set(merged.keys())
    with safe_open(base / "base" / "model.safetensors", "pt") as released:
        assert names == set(released.keys())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("peft.dim=null", "enabled without dim"),
        ("peft.alpha=null", "enabled without alpha"),
        ("peft.exclude_modules=[linear_fc1]", "either target_modules or exclude_modules"),
        ("peft.dropout=1.0", "peft.dropout"),
        ("peft.rank=8", "no such key, the nearest is"),
        ("trainer.provider.moe_router_bias_update_rate=0.001", "moe_router_bias_update_rate"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(files: Path, tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(RunError, match=re.escape(words)):
        load(ROOT / "examples/grpo/cpu_lora.yaml", [*paths(files, tmp_path), override])


def test_an_export_does_not_go_over_a_folder(files: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is there already"):
        load(ROOT / "examples/grpo/cpu_lora.yaml", [*paths(files, tmp_path), f"export={tmp_path}"])


def paths(files: Path, tmp_path: Path) -> list[str]:
    return [f"model={files / 'model'}", f"data={files / 'train.jsonl'}", "eval_data=null", f"out={tmp_path / 'run'}"]
