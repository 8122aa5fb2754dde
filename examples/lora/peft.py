"""PEFT's adapter folder: `adapter_config.json` and `adapter_model.safetensors`, written and read.

Names are `base_model.model.<module>.lora_A.weight` [rank, in] and `lora_B` [out, rank], and a weight's change is
`lora_alpha / r * B @ A`: as `save_hf_adapter` of Megatron-Bridge 0.6.2 writes it and `PEFTHelper` of vLLM 0.32 reads it.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from examples.errors import RunError
from examples.lora import base
from examples.lora.settings import Settings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def config(ranks: Mapping[str, int], settings: Settings, base_path: str, modules: Collection[str]) -> dict[str, Any]:
    """The content of adapter_config.json for adapted modules with their ranks, of all modules of the base."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets(ranks, modules),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != settings.rank},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def targets(adapted: Collection[str], modules: Collection[str]) -> list[str]:
    """The shortest ends of names that PEFT matches with every adapted module and with no other one of the base."""
    every = Counter(end for name in modules for end in _ends(name))
    mine = Counter(end for name in adapted for end in _ends(name))
    return sorted({next(end for end in _ends(name) if every[end] == mine[end]) for name in adapted})


def _ends(name: str) -> Iterator[str]:
    words = name.split(".")
    return (".".join(words[-count:]) for count in range(1, len(words) + 1))


def write(folder: Path, matrices: Iterable[tuple[str, Tensor, Tensor]], content: Mapping[str, Any]) -> None:
    """Write (module, A, B) and the configuration into a folder that is there."""
    tensors: dict[str, Tensor] = {}
    for module, a, b in matrices:
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


@dataclass(frozen=True)
class Folder:
    """An adapter folder that was read: the matrices' names and shapes, and what scales them."""

    tensors: base.Tensors
    content: Mapping[str, Any]
    modules: Sequence[str]

    def delta(self, module: str) -> Tensor:
        """What the adapter adds to a module's weight, fp32 [out, in]."""
        a, b = (self.tensors.get(f"{PREFIX}{module}.lora_{side}.weight").float() for side in "AB")
        rank = self._of("rank_pattern", module) or self.content["r"]
        alpha = self._of("alpha_pattern", module) or self.content["lora_alpha"]
        return alpha / rank * (b @ a)

    def _of(self, pattern: str, module: str) -> Any:
        """PEFT's rule: the first key that ends the module's name, from a dot on."""
        found = (
            value for key, value in (self.content.get(pattern) or {}).items() if re.match(rf"(.*\.)?({key})$", module)
        )
        return next(found, None)


def read(folder: Path) -> Folder:
    """Read an adapter folder.

    Raises:
        RunError: a file is missing or damaged, a name is no LoRA matrix, or one stands alone.
    """
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / CONFIG}: cannot be read ({error}); give a PEFT adapter folder") from error
    tensors = base.tensors(folder)
    sides: dict[str, set[str]] = {"A": set(), "B": set()}
    for name in tensors.shapes:
        match = re.match(rf"^{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight$", name)
        if not match:
            raise RunError(f"{folder / WEIGHTS}: {name} is no matrix of plain LoRA")
        sides[match[2]].add(match[1])
    if alone := sides["A"] ^ sides["B"]:
        raise RunError(f"{folder / WEIGHTS}: {min(alone)} has one of lora_A and lora_B only")
    return Folder(tensors, content, sorted(sides["A"]))
