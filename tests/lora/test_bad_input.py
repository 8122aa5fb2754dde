"""What bad input of the LoRA converter gets: exit status 1, one line that names it, and nothing written."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch

from examples import convert_lora
from examples.lora import peft
from tests.lora.files import (
    FC2,
    QKV,
    Change,
    Command,
    Files,
    assert_refused,
    config,
    extra,
    stacked,
    trained,
    without,
)


def test_good_input_is_converted(files: Files, command: Command) -> None:
    """Else nothing below would say anything."""
    files.write()
    status, out, _ = command(files)
    assert status == 0
    assert "8 modules from 8 tensors" in out
    assert [path.name for path in files.out.parent.iterdir()] == ["adapter"]
    assert sorted(path.name for path in files.out.iterdir()) == [peft.CONFIG, peft.WEIGHTS]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (config(architectures=["BertModel"]), r"config\.json: architectures \['BertModel'\] are not known"),
        (config(num_key_value_heads=3), r"linear_qkv: 3 query groups do not divide 4 heads .*config\.json"),
        (
            config(head_dim=8),
            r"linear_out has 32 rows; 4 heads in 2 groups of dimension 8.* make 64: BASE is not the model",
        ),
        (config(num_attention_heads=None), "num_attention_heads is None, a positive number is needed"),
        (stacked(3), "3 layers are stacked, the base has 2"),
        (
            extra(FC2.format(2, "linear_in"), 2, 12),
            r"layers\.2\.mlp\.linear_fc2: linear_out is not whole.* has nothing",
        ),
        (without(QKV.format(1, "linear_in")), r"layers\.1\.self_attention\.linear_qkv: linear_in is not whole"),
        (
            extra(FC2.format(0, "linear_in"), 2, 16),
            r"the adapter is for a weight of \[8, 16\], .*down_proj.weight .* \[8, 12\]",
        ),
        (extra(FC2.format(0, "linear_in"), 3, 12), "linear_in has rank 3, linear_out 2"),
        (extra(FC2.format(0, "linear_in"), 1, 2, 12), r"shape \[1, 2, 12\] is no LoRA matrix"),
        (trained(dim=4), r"rank 2 in the checkpoint, peft\.dim 4 in its run config"),
        (trained(dim="two"), r"run_config\.yaml: peft\.dim is 'two', a number is needed"),
        (trained(alpha=None), r"peft\.alpha is None"),
        (trained(dropout=1), "dropout 1; expected"),
        (trained(_target_="megatron.bridge.peft.dora.DoRA"), r"peft\._target_ is 'megatron\.bridge\.peft\.dora\.DoRA'"),
        (trained(dropout=0.1, dropout_position="post"), "dropout_position is 'post'.* --skip dropout_position goes on"),
        (
            extra("decoder.layers.0.mlp.linear_fc2.lora_a.weight", 2, 12),
            r"linear_fc2\.lora_a\.weight is a tensor that is neither",
        ),
        (extra("vision_model.proj.weight", 2, 2), "vision_model.proj.weight is a tensor that is neither"),
        (extra("decoder.layers.0.mlp.linear_fc2.adapter.weight_magnitude", 8), "weight_magnitude: no LoRA matrix"),
        (
            extra("decoder.layers.0.mlp.router.adapter.linear_in.weight", 2, 8),
            r"mlp\.router: an adapter here has no counterpart",
        ),
        (
            extra("mtp.layers.0.eh_proj.adapter.linear_in.weight", 2, 8),
            r"mtp\.layers\.0\.eh_proj: an adapter here has no count",
        ),
        (extra("decoder.layers.7.mlp.linear_fc1.adapter.linear_in.weight", 2, 8), "linear_out is not whole"),
    ],
)
def test_one_clear_line(files: Files, command: Command, change: Change, wanted: str) -> None:
    change(files)
    files.write()
    assert_refused(command(files), wanted, files)


def test_a_module_that_the_base_does_not_have(files: Files, command: Command) -> None:
    files.tensors |= {
        FC2.format(9, side): torch.zeros(shape) for side, shape in (("linear_in", (2, 12)), ("linear_out", (8, 2)))
    }
    files.write()
    assert_refused(command(files), r"the base has no model\.layers\.9\.mlp\.down_proj\.weight", files)


def test_only_base_weights(files: Files, command: Command) -> None:
    files.tensors = {
        "decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(8, 12),
        "output_layer.weight": torch.zeros(4, 8),
    }
    files.write()
    assert_refused(command(files), "2 tensors, no adapter to convert", files)


Damage = Callable[[Files], object]


def cut(files: Files) -> None:
    file = files.distcp()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def scramble(files: Files) -> None:
    files.distcp().write_bytes(b"\0" * files.distcp().stat().st_size)


def drop_run_config(files: Files) -> None:
    (files.checkpoint / "run_config.yaml").unlink()


def stale_latest(files: Files) -> None:
    (files.checkpoint / ".metadata").unlink()
    (files.checkpoint / "latest_checkpointed_iteration.txt").write_text("300")


def index(files: Files) -> None:
    (files.base / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (cut, r"\.distcp: cut short, \d+ bytes of at least \d+"),
        (scramble, r"cannot be read .*a \.distcp file is damaged"),
        (lambda files: files.distcp().unlink(), r"\.distcp: missing, and `\.metadata` places tensors in it"),
        (lambda files: (files.checkpoint / ".metadata").write_bytes(b"\x80\x04"), r"\.metadata: cannot be read"),
        (lambda files: (files.checkpoint / ".metadata").write_bytes(b"hello"), r"\.metadata: cannot be read"),
        (lambda files: (files.checkpoint / ".metadata").unlink(), r"neither `\.metadata` nor `iter_\*` in it"),
        (
            lambda files: (files.checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "written as zarr",
        ),
        (lambda files: (files.checkpoint / "metadata.json").write_text("{"), r"metadata\.json: not JSON"),
        (stale_latest, r"latest_checkpointed_iteration\.txt says '300', and .*iter_0000300 holds no"),
        (drop_run_config, r"run_config\.yaml: missing; rank, alpha and dropout"),
        (lambda files: (files.checkpoint / "run_config.yaml").write_text("model: {}"), "no `peft` section"),
        (lambda files: (files.checkpoint / "run_config.yaml").write_text("peft: null"), "no `peft` section"),
        (lambda files: (files.checkpoint / "run_config.yaml").write_text("a: [b"), r"run_config\.yaml: not YAML"),
        (lambda files: (files.checkpoint / "run_config.yaml").write_text("- a"), "expected sections"),
        (lambda files: (files.base / "config.json").unlink(), r"config\.json: missing; BASE is"),
        (lambda files: (files.base / "config.json").write_text("{"), r"config\.json: not JSON"),
        (lambda files: (files.base / "model.safetensors").unlink(), r"no \*\.safetensors in it"),
        (lambda files: (files.base / "model.safetensors").write_bytes(b"short"), r"model\.safetensors: cannot be read"),
        (
            lambda files: (files.base / "model.safetensors.index.json").write_text("[]"),
            r"index\.json: no JSON object but list",
        ),
        (index, r"names model-00002\.safetensors, which is missing"),
    ],
)
def test_damaged_files(files: Files, command: Command, damage: Damage, wanted: str) -> None:
    files.write()
    damage(files)
    assert_refused(command(files), wanted, files)


@pytest.mark.parametrize("kind", ["folder", "file", "link to nothing"])
def test_an_output_that_exists_is_not_touched(files: Files, command: Command, kind: str) -> None:
    files.write()
    if kind == "folder":
        files.out.mkdir()
    elif kind == "file":
        files.out.write_text("mine")
    else:
        files.out.symlink_to(files.root / "nothing")
    status, _, err = command(files)
    assert (status, err) == (1, f"error: {files.out}: exists; remove it or give another folder")
    assert list(files.out.parent.iterdir()) == [files.out]
    if kind == "folder":
        assert list(files.out.iterdir()) == []
    elif kind == "file":
        assert files.out.read_text() == "mine"


def test_a_parent_that_is_not_there(files: Files, command: Command) -> None:
    files.write()
    files.out.parent.rmdir()
    status, _, err = command(files)
    assert status == 1
    assert f"{files.out.parent}: cannot be written to (No such file or directory)" in err


def test_an_interrupt_leaves_nothing(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peft.json, "dumps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_lora.convert(files.checkpoint, files.base, files.out)
    assert list(files.out.parent.iterdir()) == []
