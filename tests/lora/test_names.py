"""What the converter takes from a checkpoint, what it leaves aside, and what it must refuse to guess."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file

from examples import tiny_nemotron_h
from examples.errors import RunError
from examples.lora import base, peft
from examples.lora.checkpoint import Entry
from examples.lora.plan import plan
from examples.lora.settings import Settings
from tests.lora.files import QKV, Command, Files, assert_refused, extra


def test_skip_leaves_out_what_it_names_and_says_so(files: Files, command: Command) -> None:
    extra("mtp.layers.0.eh_proj.adapter.linear_in.weight", 2, 8)(files)
    extra("decoder.layers.0.mlp.router.adapter.linear_in.weight", 2, 8)(files)
    files.write()
    status, out, _ = command(files, "--skip", "mtp.*", "--skip", "*.router.*")
    assert status == 0
    assert "2 names skipped: " in out
    assert "mtp.layers.0.eh_proj.adapter.linear_in.weight" in out
    assert len(peft.read(files.out).modules) == 8


def test_skip_that_matches_nothing(files: Files, command: Command) -> None:
    files.write()
    assert_refused(command(files, "--skip", "mpt.*"), r"--skip 'mpt\.\*' matches no adapter", files)


def test_skip_of_one_side_is_no_adapter(files: Files, command: Command) -> None:
    files.write()
    found = command(files, "--skip", QKV.format(0, "linear_in"))
    assert_refused(found, "linear_in is not whole, the checkpoint has nothing", files)


def test_a_part_of_the_modules_is_named_precisely(files: Files, command: Command) -> None:
    files.write()
    command(files, "--skip", "decoder.layers.1.mlp.*")
    content = json.loads((files.out / peft.CONFIG).read_text())
    assert content["target_modules"] == ["0.mlp.down_proj", "k_proj", "q_proj", "v_proj"]


def test_optimizer_states_and_base_weights_are_no_adapters(files: Files, command: Command) -> None:
    name = QKV.format(0, "linear_in")
    for prefix in ("optimizer.state.exp_avg.", "chained_1.optimizer.state.exp_avg_sq."):
        extra(prefix + name, 2, 8)(files)
    extra("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_float32.bucket_idx_0.exp_avg", 16)(files)
    extra("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", 8)(files)
    extra("decoder.layers.0.mixer.in_proj.weight.dt", 8, 8)(files)
    files.write()
    assert command(files)[0] == 0
    matrix = load_file(files.out / peft.WEIGHTS)["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert torch.equal(matrix, files.tensors[name])


@pytest.mark.parametrize("prefix", ["model.", "model0.", "module.module.", "model0.module."])
def test_wrappers_in_names(files: Files, command: Command, prefix: str) -> None:
    files.tensors = {prefix + name: tensor for name, tensor in files.tensors.items()}
    files.write()
    assert command(files)[0] == 0


@pytest.mark.parametrize("latest", [True, False])
def test_the_latest_iteration_counts(files: Files, command: Command, latest: bool) -> None:
    files.write()
    whole = files.checkpoint.rename(files.root / "iter_0000020")
    files.checkpoint.mkdir()
    whole.rename(files.checkpoint / "iter_0000020")
    (files.checkpoint / "iter_0000010").mkdir()
    if latest:
        (files.checkpoint / "latest_checkpointed_iteration.txt").write_text("20\n")
    status, out, _ = command(files)
    assert status == 0
    assert "iter_0000020" in out


SETTINGS = Settings(rank=2, alpha=4, dropout=0.0, smaller_experts=False, dropout_position="pre")


def hybrid(tmp_path: Path, *entries: tuple[str, tuple[int, ...], int]) -> Callable[[], object]:
    model = base.read(tiny_nemotron_h.save(tmp_path / "base", pattern="ME"))
    found = [Entry(name, name, shape, torch.float32, parts) for name, shape, parts in entries]
    return lambda: plan(found, model, SETTINGS)


def test_an_input_projection_that_several_ranks_wrote_whole(tmp_path: Path) -> None:
    """Its rows are z, x, B, C, dt of the first rank, then of the second."""
    name = "decoder.layers.0.mixer.in_proj.adapter.{}.weight"
    made = hybrid(tmp_path, (name.format("linear_in"), (2, 64), 1), (name.format("linear_out"), (328, 2), 2))
    with pytest.raises(RunError, match="written by 2 tensor-parallel ranks without its parts apart"):
        made()
    hybrid(tmp_path, (name.format("linear_in"), (2, 64), 1), (name.format("linear_out"), (328, 2), 1))()


def test_another_mambas_parts(tmp_path: Path) -> None:
    name = "decoder.layers.0.mixer.in_proj.adapter.{}.weight"
    sizes = {".z": 128, ".x": 128, ".B": 24, ".C": 40, ".dt": 8}
    parts = [(name.format("linear_out") + part, (size, 2), 1) for part, size in sizes.items()]
    with pytest.raises(
        RunError, match=r"\[128, 128, 24, 40, 8\] rows of z, x, B, C and dt, .* gives \[128, 128, 32, 32, 8\]"
    ):
        hybrid(tmp_path, (name.format("linear_in"), (2, 64), 1), *parts)()
    with pytest.raises(
        RunError, match=r"linear_out is not whole, the checkpoint has weight\.B, weight\.C, weight\.x, weight\.z"
    ):
        hybrid(tmp_path, (name.format("linear_in"), (2, 64), 1), *parts[:-1])()


def test_another_number_of_experts(tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.experts.experts.linear_fc1.adapter.{}.weight"
    made = hybrid(tmp_path, (name.format("linear_in"), (4, 2, 32), 1), (name.format("linear_out"), (4, 32, 2), 1))
    with pytest.raises(RunError, match="adapters of 4 experts, the base has 8 as"):
        made()
