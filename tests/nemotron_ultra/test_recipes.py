"""The two configurations: they load, they divide, and Megatron-Bridge builds from them a model without multi-token prediction."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

OmegaConf = pytest.importorskip("omegaconf").OmegaConf
pytest.importorskip("pydantic")

from examples.grpo.config import Config, load  # noqa: E402 # omegaconf may be absent
from tests.nemotron_ultra.conftest import ROOT  # noqa: E402 # as above

RECIPES = ROOT / "examples" / "nemotron_ultra"
#: Sets each provider as a recipe does, and as a reader might who wants no MTP; prints the layer pattern after `finalize`.
PATTERNS = """
import json, os, sys
os.environ["TORCHDYNAMO_DISABLE"] = "1"
from examples.grpo import megatron_on_cpu, plain_layers
megatron_on_cpu.prepare()
plain_layers.prepare()
from megatron.bridge import AutoBridge
found = []
for settings in json.loads(sys.argv[2]):
    provider = AutoBridge.from_hf_pretrained(sys.argv[1]).to_megatron_provider(load_weights=False)
    for name, value in settings.items():
        if not hasattr(provider, name):
            raise AttributeError(name)
        setattr(provider, name, value)
    plain_layers.use(provider)
    provider.recompute_granularity = None
    provider.finalize()
    found.append(provider.hybrid_layer_pattern)
print(json.dumps(found))
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that let a recipe find its files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((RECIPES / "model_config.json").read_text())
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    return [f"model={tmp_path / 'model'}", f"data={tmp_path / 'a.jsonl'}", f"eval_data={tmp_path / 'a.jsonl'}"]


def recipe(name: str, files: list[str]) -> Config:
    return load(RECIPES / f"{name}.yaml", files)


def test_full_fine_tuning_is_colocated_on_8_nodes_of_8(files: list[str]) -> None:
    config = recipe("full", files)
    sizes = config.trainer
    assert (sizes.ranks, sizes.tensor_parallel, sizes.pipeline_parallel) == (64, 8, 4)
    assert (sizes.expert_parallel, sizes.expert_tensor_parallel, sizes.data_parallel) == (16, 1, 2)
    assert (config.rollout.engines, config.rollout.tensor_parallel, config.rollout.pipeline_parallel) == (2, 8, 4)
    assert (config.sync.backend, config.device, sizes.transformer_engine) == ("ipc", "cuda", True)
    # Weights, their gradients and the engine leave no room for the optimizer's own (see examples/plan.py).
    assert sizes.optimizer["optimizer_cpu_offload"] is True


def test_lora_trains_on_4_nodes_and_generates_on_2(files: list[str]) -> None:
    config = recipe("lora", files)
    sizes = config.trainer
    assert sizes.ranks == 4 * 4
    assert sizes.tensor_parallel * sizes.pipeline_parallel * sizes.data_parallel == 16
    assert config.rollout.engines * config.rollout.tensor_parallel * config.rollout.pipeline_parallel == 2 * 4
    assert (config.sync.backend, config.sync.packed, config.peft.enabled) == ("nccl", True, True)
    assert "out_proj" not in config.peft.target_modules


@pytest.mark.parametrize("name", ["full", "lora"])
def test_layers_experts_and_groups_divide(name: str, files: list[str]) -> None:
    config, model = recipe(name, files), json.loads((RECIPES / "model_config.json").read_text())
    for sizes in (config.trainer, config.rollout):
        assert model["n_groups"] % sizes.tensor_parallel == 0
        assert model["num_hidden_layers"] % sizes.pipeline_parallel == 0
    assert model["n_routed_experts"] % config.trainer.expert_parallel == 0
    stage = config.trainer.ranks // config.trainer.pipeline_parallel
    assert stage % (config.trainer.expert_parallel * config.trainer.expert_tensor_parallel) == 0


@pytest.mark.parametrize(("name", "gpu"), [("full", "h200"), ("lora", "gb200")])
def test_the_planner_finds_room(name: str, gpu: str, files: list[str], tmp_path: Path) -> None:
    text = (RECIPES / f"{name}.yaml").read_text().replace("/local/nvme/ultra/model", str(tmp_path / "model"))
    (tmp_path / "recipe.yaml").write_text(text)
    command = [sys.executable, "-m", "examples.plan", "--driver", str(tmp_path / "recipe.yaml"), "--gpu", gpu]
    found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-600:] + found.stderr


def test_the_recipes_leave_out_multi_token_prediction_and_half_of_it_does_not(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from examples import tiny_nemotron_h

    values = {**tiny_nemotron_h.config("MEM*"), "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(values))
    loaded = [OmegaConf.load(RECIPES / f"{name}.yaml") for name in ("full", "lora")]
    providers = [OmegaConf.to_container(one.trainer.provider) for one in loaded]
    halves = [{}, {"mtp_num_layers": None}, {"mtp_num_layers": 0}]
    command = [sys.executable, "-W", "ignore", "-c", PATTERNS, str(tmp_path / "tiny"), json.dumps(providers + halves)]
    found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert json.loads(found.stdout.splitlines()[-1]) == ["MEM*", "MEM*", "MEM*/*E", "MEM*/*E", "MEM*/*E"]
