"""A base model and a checkpoint of adapters that fit each other, for tests that change one thing.

Checkpoints are torch's own distributed format with Megatron's names, so no Megatron is needed.
"""

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import save_file

#: Runs the command line on files with options; gives its status, stdout and stderr.
Command = Callable[..., tuple[int, str, str]]

QKV = "decoder.layers.{}.self_attention.linear_qkv.adapter.{}.weight"
FC2 = "decoder.layers.{}.mlp.linear_fc2.adapter.{}.weight"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


@dataclass
class Files:
    """A base model and an adapter checkpoint that fit each other, where they are, and where the adapter is to go."""

    root: Path
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    peft: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        """The torch_dist folder."""
        return self.root / "checkpoint"

    @property
    def base(self) -> Path:
        """The Hugging Face folder."""
        return self.root / "base"

    @property
    def out(self) -> Path:
        """The folder to be written, alone in its parent."""
        return self.root / "results" / "adapter"

    def write(self) -> None:
        """The folders, from what a test made of the fields."""
        self.out.parent.mkdir(exist_ok=True)
        self.base.mkdir(exist_ok=True)
        (self.base / "config.json").write_text(json.dumps(self.config))
        save_file(weights(), self.base / "model.safetensors")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(dict(self.tensors), checkpoint_id=self.checkpoint, no_dist=True)
        (self.checkpoint / "run_config.yaml").write_text(yaml.safe_dump({"peft": self.peft}))

    def distcp(self) -> Path:
        """The one file of values."""
        (file,) = self.checkpoint.glob("*.distcp")
        return file


def weights() -> dict[str, torch.Tensor]:
    """The base: fp32, from one seed."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q_proj": (16, 8), "k_proj": (8, 8), "v_proj": (8, 8), "o_proj": (8, 16)}
    found = {f"self_attn.{name}": shape for name, shape in shapes.items()} | {"mlp.down_proj": (8, 12)}
    return {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape, generator=generator)
        for layer in range(2)
        for name, shape in found.items()
    }


def matching(root: Path) -> Files:
    """Two layers with adapters of `linear_qkv` and `linear_fc2`, of rank 2."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        for name, inside, outside in ((QKV, 8, 32), (FC2, 12, 8)):
            tensors[name.format(layer, "linear_in")] = torch.randn(2, inside, generator=generator)
            tensors[name.format(layer, "linear_out")] = torch.randn(outside, 2, generator=generator)
    target = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 2, "alpha": 4, "dropout": 0.0}
    return Files(root, tensors, dict(CONFIG), target)


def assert_refused(found: tuple[int, str, str], wanted: str, files: Files) -> None:
    """One line, status 1, and nothing where the adapter was to go."""
    status, out, err = found
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert "\n" not in err
    assert re.search(wanted, err), err
    assert list(files.out.parent.iterdir()) == []


Change = Callable[[Files], object]


def without(name: str) -> Change:
    """Drop a tensor."""
    return lambda files: files.tensors.pop(name)


def extra(name: str, *shape: int) -> Change:
    """Add a tensor of zeros."""
    return lambda files: files.tensors.update({name: torch.zeros(shape)})


def config(**values: Any) -> Change:
    """Change the base's config.json."""
    return lambda files: files.config.update(values)


def trained(**values: Any) -> Change:
    """Change the `peft` section."""
    return lambda files: files.peft.update(values)


def stacked(count: int) -> Change:
    """Only adapters of `linear_fc2`, of so many layers along a leading axis."""

    def change(files: Files) -> None:
        files.tensors = {
            FC2.replace("{}.", "", 1).format("linear_in"): torch.zeros(count, 2, 12),
            FC2.replace("{}.", "", 1).format("linear_out"): torch.zeros(count, 8, 2),
        }

    return change
