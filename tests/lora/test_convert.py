"""Adapters that real Megatron-Bridge made, on one and several ranks, become PEFT folders that merge into the same weights.

Bridge's LoRA, its checkpoints, its merged export and its own adapter export are all the released ones; layers are the CPU
stand-ins of `tests.support.te_layers`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from examples.convert_lora import convert
from examples.errors import RunError
from examples.lora import base, checkpoint, peft, verify

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MAMBA = {"target_modules": ["in_proj", "out_proj", "linear_qkv", "linear_proj"]}

#: By the number of ranks: each starts one process a rank for all of its cases.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        # All of the model in the checkpoint, not only its adapters; Mamba, attention, MLP, experts, shared experts.
        "hybrid": {"model": "nemotron_h", "whole": True},
        # 32 heads in 8 groups, 256 channels of 64 hidden ones; layers stacked.
        "stacked": {"model": "qwen3"},
        "canonical": {"model": "qwen3", "canonical": True},
        "bf16": {"model": "qwen3", "bf16": True},
        # An adapter an expert, of half the rank, as two experts take each token.
        "smaller experts": {
            "model": "nemotron_h",
            "lora": {"share_expert_adapters": False, "normalize_moe_lora": True},
        },
    },
    2: {
        "mamba TP2": {"model": "nemotron_h", "tensor": 2, "in_place": True, "lora": MAMBA},
        "experts EP2": {"model": "qwen3_moe", "expert": 2, "lora": {"share_expert_adapters": False}},
        "apart TP2": {"model": "qwen3", "tensor": 2, "metadata": {"non_homogeneous_layers": True}},
        # The GRPO example's model and layers: a dense layer, then experts one by one and a shared one.
        "glm EP2": {"model": "glm4_moe", "expert": 2, "plain": True},
    },
    4: {
        "hybrid PP2 x EP2": {"model": "nemotron_h", "pipeline": 2, "expert": 2},
        "stacked TP2 x PP2": {"model": "qwen3", "tensor": 2, "pipeline": 2},
    },
}
RANKS = {name: ranks for ranks, cases in CASES.items() for name in cases}
FP32 = [name for name in RANKS if name != "bf16"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case; its ranks run once for all cases of as many ranks."""
    roots: dict[int, Path] = {}

    def get(name: str) -> Path:
        ranks = RANKS[name]
        if ranks not in roots:
            root = tmp_path_factory.mktemp(f"ranks-{ranks}")
            _launch(ranks, root)
            roots[ranks] = root
        return roots[ranks] / name

    return get


def _launch(ranks: int, root: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    found = subprocess.run(
        [*launcher, "tests/lora/lora_case.py", str(root), json.dumps(CASES[ranks])],
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]


def converted(case: Path, out: Path) -> Path:
    convert(case / "checkpoint", case / "base", out)
    return out


def compared(case: Path, adapter: Path, merged: str = "merged") -> verify.Comparison:
    return verify.compare(adapter, base.read(case / "base"), case / merged)


@pytest.mark.parametrize("name", FP32)
def test_it_merges_to_what_megatron_exports(made: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    case = made(name)
    seen = compared(case, converted(case, tmp_path / "out"))
    assert seen.worst < 1e-6
    assert seen.compared == len(base.tensors(case / "base").shapes)
    assert seen.adapted > 0
    assert seen.unmoved == ()


@pytest.mark.parametrize("name", [name for name in RANKS if name not in ("mamba TP2", "glm EP2")])
def test_names_and_values_are_those_of_bridge(made: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    case = made(name)
    ours = load_file(converted(case, tmp_path / "out") / peft.WEIGHTS)
    theirs = load_file(case / "bridge" / peft.WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    mine, bridge = (json.loads((folder / peft.CONFIG).read_text()) for folder in (tmp_path / "out", case / "bridge"))
    for key in ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "target_modules", "bias", "use_rslora"):
        assert mine[key] == bridge[key], key
    assert set(mine["rank_pattern"].values()) == set(bridge["rank_pattern"].values())
    assert len(mine["rank_pattern"]) == len(bridge["rank_pattern"])


def test_bridges_own_adapter_lacks_experts_of_other_ranks(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Where experts are modules one by one, Bridge 0.6.2 writes those of the first expert-parallel rank alone."""
    case = made("glm EP2")
    ours = load_file(converted(case, tmp_path / "out") / peft.WEIGHTS)
    theirs = load_file(case / "bridge" / peft.WEIGHTS)
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    assert {key.split(".experts.")[1].partition(".")[0] for key in ours.keys() - theirs.keys()} == set("4567")


def test_rank_alpha_and_dropout_are_the_runs(made: Callable[[str], Path], tmp_path: Path) -> None:
    content = peft.read(converted(made("hybrid"), tmp_path / "out")).content
    assert (content["r"], content["lora_alpha"], content["lora_dropout"]) == (4, 8, 0.1)


def test_every_kind_of_nemotron_module_is_there(made: Callable[[str], Path], tmp_path: Path) -> None:
    modules = peft.read(converted(made("hybrid"), tmp_path / "out")).modules
    at = "backbone.layers.{}.mixer."
    wanted = [at.format(0) + name for name in ("in_proj", "out_proj")]
    wanted += [at.format(1) + f"{name}_proj" for name in "qkvo"]
    wanted += [at.format(2) + name for name in ("up_proj", "down_proj")]
    wanted += [
        at.format(3) + f"{part}.{name}"
        for part in ("shared_experts", *(f"experts.{expert}" for expert in range(8)))
        for name in ("up_proj", "down_proj")
    ]
    assert list(modules) == sorted(wanted)


def test_the_checkpoints_are_what_the_cases_say(made: Callable[[str], Path]) -> None:
    """Layers are stacked or apart, several ranks wrote, and base weights are in the one that has them."""
    name = "self_attention.linear_qkv.adapter.linear_out.weight"
    shapes = {
        case: {entry.name: entry.shape for entry in checkpoint.read(made(case) / "checkpoint").tensors}
        for case in ("hybrid", "stacked", "apart TP2", "stacked TP2 x PP2")
    }
    assert shapes["stacked"][f"decoder.layers.{name}"] == (4, 384, 4)
    assert shapes["stacked TP2 x PP2"][f"decoder.layers.{name}"] == (4, 384, 4)
    assert shapes["apart TP2"][f"decoder.layers.3.{name}"] == (384, 4)
    assert "embedding.word_embeddings.weight" in shapes["hybrid"]
    assert len(list((made("stacked TP2 x PP2") / "checkpoint").glob("*.distcp"))) == 4


def _contiguous(case: Path, adapter: Path) -> None:
    """Give q, k and v of each layer the rows that they would have if the fused ones were q, then k, then v."""
    tensors = load_file(adapter / peft.WEIGHTS)
    stored = checkpoint.read(case / "checkpoint")
    fused = [entry for entry in stored.tensors if "linear_qkv.adapter.linear_out" in entry.name]
    (stacked,) = checkpoint.load(stored, fused).values()
    for layer, rows in enumerate(stacked):
        for name, part in zip("qkv", rows.split([256, 64, 64]), strict=True):
            tensors[f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_B.weight"] = part.clone()
    save_file(tensors, adapter / peft.WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["stacked", "bf16"])
def test_verify_catches_a_contiguous_split(made: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    case = made(name)
    adapter = converted(case, tmp_path / "out")
    compared(case, adapter)
    _contiguous(case, adapter)
    with pytest.raises(RunError, match=r"self_attn\.[qkv]_proj\.weight: merged it differs .* so do 12 of 47 tensors"):
        compared(case, adapter)


def test_bf16_is_compared_within_a_rounding(made: Callable[[str], Path], tmp_path: Path) -> None:
    case = made("bf16")
    adapter = converted(case, tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(adapter / peft.WEIGHTS).values()} == {torch.bfloat16}
    assert compared(case, adapter).adapted == 28
    with pytest.raises(RunError, match="allowed is 1e-09"):
        verify.compare(adapter, base.read(case / "base"), case / "merged", tolerance=1e-9)


def test_mamba_on_tensor_parallel_ranks_is_what_the_ranks_compute(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Their rows of z, x, B, C and dt, which Bridge 0.6.2 without the overlay puts one rank's before the next one's."""
    case = made("mamba TP2")
    adapter = converted(case, tmp_path / "out")
    seen = compared(case, adapter, "in_place")
    assert seen.worst < 1e-6
    assert (seen.adapted, seen.unmoved) == (6, ())


def test_the_command_needs_no_megatron(made: Callable[[str], Path], tmp_path: Path) -> None:
    case = made("hybrid")
    arguments = [str(case / part) for part in ("checkpoint", "base")] + [str(tmp_path / "out")]
    blocked = "import sys; sys.modules['megatron'] = None; from examples.convert_lora import main; sys.exit(main())"
    found = subprocess.run(
        [sys.executable, "-c", blocked, *arguments, "--verify", str(case / "merged")],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert "26 modules from 24 tensors" in found.stdout
    assert "43 tensors are the same as in the merged export" in found.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_vllm_loads_every_matrix(made: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

    adapter = converted(made("smaller experts"), tmp_path / "out")
    folder = peft.read(adapter)
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "up_proj", "down_proj"}
    experts = {f"experts.{expert}.{name}" for expert in range(8) for name in ("up_proj", "down_proj")}
    loaded = LoRAModel.from_local_checkpoint(
        str(adapter),
        linears | experts,
        PEFTHelper.from_local_dir(str(adapter), None),
        lora_model_id=1,
        device="cpu",
        weights_mapper=NemotronHForCausalLM.hf_to_vllm_mapper.get_rename_mapper(),
        skip_prefixes=NemotronHForCausalLM.lora_skip_prefixes,
    )
    assert len(loaded.loras) == len(folder.modules)
    for module in folder.modules:
        weights = loaded.loras[module.replace("backbone", "model", 1)]
        assert torch.allclose(weights.scaling * (weights.lora_b @ weights.lora_a), folder.delta(module)), module
    assert {weights.rank for weights in loaded.loras.values()} == {2, 4}
