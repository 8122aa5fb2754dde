"""The comparison with a merged export: what it must catch, and what it must not claim."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file, save_file

from examples import convert_lora
from examples.errors import RunError
from examples.lora import base, peft, verify
from tests.lora.files import Command, Files, assert_refused, weights


def test_a_failed_comparison_leaves_nothing(files: Files, command: Command) -> None:
    files.write()
    merged = files.root / "merged"
    merged.mkdir()
    save_file(weights(), merged / "model.safetensors")
    found = command(files, "--verify", str(merged))
    assert_refused(found, "merged it differs from the export by .* so do 8 of 10 tensors", files)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda tensors: tensors.pop("model.layers.0.self_attn.o_proj.weight"), "o_proj.weight: in BASE only"),
        (lambda tensors: tensors.update({"a.weight": torch.zeros(1)}), "a.weight: in MERGED only"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.weight": torch.zeros(8, 8)}),
            r"\[8, 16\] in BASE, \[8, 8\] in MERGED",
        ),
        (
            lambda tensors: tensors["model.layers.0.self_attn.o_proj.weight"].fill_(torch.nan),
            "o_proj.weight: merged it differs from the export by inf",
        ),
    ],
)
def test_an_export_of_another_model(
    files: Files, change: Callable[[dict[str, torch.Tensor]], object], wanted: str
) -> None:
    merged = merged_export(files)
    tensors = load_file(merged / "model.safetensors")
    change(tensors)
    save_file(tensors, merged / "model.safetensors")
    with pytest.raises(RunError, match=wanted):
        verify.compare(files.out, base.read(files.base), merged)


def merged_export(files: Files) -> Path:
    """Convert, and merge layer by layer as PEFT defines it."""
    files.write()
    convert_lora.convert(files.checkpoint, files.base, files.out)
    tensors, adapter = weights(), load_file(files.out / peft.WEIGHTS)
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(peft.PREFIX).removesuffix(".lora_A.weight")
            tensors[f"{module}.weight"] += 2 * (adapter[name.replace("lora_A", "lora_B")] @ adapter[name])
    merged = files.root / "merged"
    merged.mkdir()
    save_file(tensors, merged / "model.safetensors")
    return merged


def test_an_adapter_that_changes_nothing_is_said_to_prove_nothing(files: Files) -> None:
    files.tensors = {name: tensor * ("linear_in" in name) for name, tensor in files.tensors.items()}
    merged = merged_export(files)
    seen = verify.compare(files.out, base.read(files.base), merged)
    assert len(seen.unmoved) == seen.adapted == 8
    assert "8 of 8 adapters change their weight by less than the tolerance" in str(seen)
