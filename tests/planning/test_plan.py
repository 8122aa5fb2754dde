"""The planner's arithmetic: Nemotron-3-Ultra and its published figures, properties, and what a wrong input is told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import plan as cli
from examples.planning import megatron, model, vllm
from examples.planning.checks import check
from examples.planning.layout import GPU_MIB, Layout, Lora, Rollout, Sync, Trainer
from examples.planning.plan import Plan, plan
from tests.planning.tiny import MODELS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/nemotron_ultra/model_config.json"
ULTRA = model.read(CONFIG)
FULL = (
    "--nodes 8 --gpus-per-node 8 --gpu h200 --tp 8 --pp 4 --ep 16 --vllm-tp 8 --vllm-pp 4 --colocated --buffer-mib 2048"
)
LORA = "--nodes 6 --rollout-nodes 2 --gpus-per-node 4 --gpu gb200 --tp 4 --ep 16 --vllm-tp 8 --lora-dim 32"


def layout(trainer: Trainer, rollout: Rollout, backend: Any = "ipc", gpu: str = "h200") -> Layout:
    return Layout(trainer, rollout, Sync(backend, buffer_mib=2048), GPU_MIB[gpu] << 20)


def as_json(words: str, capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    assert cli.main([str(CONFIG), *words.split(), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_ultra_has_550e9_parameters_of_which_experts_are_515e9() -> None:
    assert ULTRA.parameters == pytest.approx(550e9, rel=0.002)
    assert (
        sum(weight.total for layer in ULTRA.layers for weight in layer if weight.routed) == 48 * 512 * 2 * 2048 * 5120
    )


def test_parameters_of_a_rank_are_the_published_ones() -> None:
    """SkyRL pull request 1816 measured 9.44e9 at TP8 PP4 EP16; the first and the last stage have a table more."""
    stages = megatron.stages(ULTRA, Trainer(64, 8, 4, 16))
    assert [round(stage.parameters / 1e9, 2) for stage in stages] == [9.58, 9.44, 9.44, 9.58]


@pytest.mark.parametrize(("pp", "published"), [(2, 76), (4, 38)])
def test_weights_and_bf16_gradients_are_the_published_ones(pp: int, published: float) -> None:
    """In the same place: weights and bf16 gradients together, in 1e9 bytes, which it calls GiB."""
    trainer = Trainer(64, 8, pp, 16, grad_bytes=2)
    sizes = [megatron.bytes_of(stage, trainer) for stage in megatron.stages(ULTRA, trainer)]
    assert max(size["weights"] + size["gradients"] for size in sizes) / 1e9 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("pp", "published"), [(2, 69), (4, 34)])
def test_69_and_34_are_vllms_weights_at_tp8(pp: int, published: float) -> None:
    """The same pull request, in 1e9 bytes: the checkpoint over TP x PP, and vLLM's shard, which repeats some weights.

    There the figures stand for Megatron's shard too (EP16 PP2 and PP4), of which they are about twice.
    """
    assert 2 * ULTRA.parameters / (8 * pp) / 1e9 == pytest.approx(published, rel=0.011)
    assert max(vllm.rank_bytes(ULTRA, Rollout(64, 8, pp))) / 1e9 == pytest.approx(published, rel=0.05)
    of_megatron = max(stage.parameters for stage in megatron.stages(ULTRA, Trainer(64, 8, pp, 16)))
    assert 2 * of_megatron / 1e9 == pytest.approx(published / 2, rel=0.13)


def test_full_fine_tuning_fits_with_the_optimizer_in_host_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    refused = as_json(FULL, capsys, status=1)
    assert refused["verdict"] == "does not fit"
    assert "--optimizer-on-host" in refused["reason"]
    taken = as_json(f"{FULL} --optimizer-on-host", capsys, status=0)
    assert taken["verdict"] == "fits"
    optimizer = refused["phases"][0]["parts"]["optimizer"]
    assert taken["phases"][0]["total"] == refused["phases"][0]["total"] - optimizer
    assert taken["host"] == optimizer


def test_lora_on_four_nodes_and_two_fits(capsys: pytest.CaptureFixture[str]) -> None:
    made = as_json(LORA, capsys, status=0)
    assert all(one["holds"] for one in made["checks"])
    train = next(phase for phase in made["phases"] if phase["name"] == "train")
    (stage,) = made["stages"]
    adapters = stage["dense_adapters"] + stage["expert_adapters"]
    assert train["parts"]["gradients"] == 4 * adapters
    assert train["parts"]["weights"] == 2 * stage["parameters"]


@pytest.mark.parametrize(
    ("words", "rule", "advice"),
    [
        ("--tp 16", "Megatron: TP | Mamba groups", "1, 2, 4, 8"),
        ("--ep 24", "EP x ETP", "1, 2, 4, 8, 16"),
        ("--pp 8", "Megatron: PP | layers", "1, 2, 3, 4, 6, 9, 12"),
        ("--vllm-tp 16 --vllm-pp 2", "vLLM: TP | Mamba groups", "1, 2, 4, 8"),
        ("--buffer-mib 512", "sync.buffer_mib", "at least 2048"),
        ("--tp 3", "TP x PP", "choose"),
    ],
)
def test_what_does_not_divide_is_said_with_what_to_choose(
    words: str, rule: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = as_json(f"{FULL} {words}", capsys, status=1)
    assert made["verdict"] == "does not divide"
    broken = [one for one in made["checks"] if not one["holds"] and rule in one["rule"]]
    assert broken, [one["rule"] for one in made["checks"] if not one["holds"]]
    assert advice in broken[0]["advice"]


def test_vllm_needs_experts_on_every_stage() -> None:
    tiny = model.from_config(MODELS["nemotron"])
    found = [one for one in check(tiny, layout(Trainer(4), Rollout(4, 1, 4))) if not one.holds]
    assert [one.rule for one in found] == ["vLLM: experts on every stage"]


SIZES = st.sampled_from([1, 2, 4])


@given(st.sampled_from(sorted(MODELS)), SIZES, SIZES, SIZES, SIZES)
def test_all_ranks_hold_the_model_at_least_once(name: str, tp: int, pp: int, ep: int, etp: int) -> None:
    tiny = model.from_config(MODELS[name])
    trainer = Trainer(16 * pp, tp, pp, ep, etp, pad_vocab=True)
    made = plan(tiny, layout(trainer, Rollout(16 * pp)))
    if made.verdict == "does not divide":
        assert made.stages == ()
        return
    trained = tiny.parameters - sum(w.total for layer in tiny.layers for w in layer if not w.trained)
    once = sum(stage.dense * tp + stage.experts * ep * etp for stage in made.stages)
    assert once >= trained
    if tp == 1 and not (tiny.tied and pp > 1):
        assert once == trained
    deeper = plan(tiny, layout(replace(trainer, gpus=trainer.gpus * 2, pp=pp * 2), Rollout(trainer.gpus * 2)))
    if deeper.verdict != "does not divide":
        assert _largest(deeper) <= _largest(made)


def _largest(made: Plan) -> int:
    return max(stage.parameters for stage in made.stages)


@given(st.integers(1, 128), st.integers(1, 16))
def test_layers_are_dealt_out_as_vllm_deals_them(layers: int, pp: int) -> None:
    parts = vllm.partition(layers, pp) if pp <= layers else []
    assert sum(map(len, parts)) == (layers if parts else 0)
    assert [layer for part in parts for layer in part] == list(range(layers if parts else 0))
    if parts:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[-1] == min(sizes)


@given(st.integers(1, 64), st.booleans())
def test_adapters_grow_with_their_dim_alone(dim: int, share: bool) -> None:
    tiny = model.from_config(MODELS["nemotron"])
    one, many = (
        megatron.stages(tiny, Trainer(1, lora=Lora(size, share_expert_adapters=share)))[0] for size in (1, dim)
    )
    assert many.adapters == dim * one.adapters
    assert many.base == one.base


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (
            '{"architectures": ["LlamaForCausalLM"]}',
            "",
            "LlamaForCausalLM is not known; known are DeepseekV3ForCausalLM",
        ),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "", "no hidden_size, which Qwen3ForCausalLM needs"),
        ("[]", "", "holds no JSON object"),
        ("{", "", "is no JSON"),
        ("{}", "--nodes 2", "leave nodes to both sides, or give --colocated"),
        ("{}", "--nodes 2 --rollout-nodes 1 --colocated", "--rollout-nodes goes without --colocated"),
    ],
)
def test_a_wrong_input_is_one_line(
    content: str, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert cli.main([str(path), *(words or "--colocated").split()]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("error: ")
    assert seen.err.count("\n") == 1
    assert said in seen.err


def test_sizes_of_a_driver_come_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["glm"]))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {tmp_path}\ntrainer: {{ranks: 4, tensor_parallel: 2, expert_parallel: 4, sequence_parallel: true}}\n"
        "rollout: {tensor_parallel: 4}\nsync: {backend: ipc}\npeft: {enabled: true, dim: 4, target_modules: [linear_qkv]}\n"
    )
    assert cli.main(["--driver", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layout"]["trainer"]["lora"]["targets"] == ["linear_qkv"]
    expected = megatron.stages(model.from_config(MODELS["glm"]), Trainer(4, 2, 1, 4, lora=Lora(4, ("linear_qkv",))))
    assert [stage["dense_adapters"] for stage in made["stages"]] == [stage.dense_adapters for stage in expected]
    assert cli.main(["--driver", str(path), "--tp", "2"]) == 1
    assert "--tp comes from" in capsys.readouterr().err
    path.write_text("trainer: {ranks: 4, tensor_parallell: 2}\nsync: {backend: ipc}\n")
    assert cli.main(["--driver", str(path)]) == 1
    assert "trainer.tensor_parallell" in capsys.readouterr().err


def test_the_tables_end_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(CONFIG), *FULL.split(), "--optimizer-on-host"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "549.31e9 parameters, 108 layers" in lines[0]
    assert lines[-1].startswith("fits: sync takes ")
