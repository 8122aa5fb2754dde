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

from examples.errors import RunError, json_file
from examples.lora import base
from examples.lora.settings import Settings, is_finite

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
        RunError: a file is missing or damaged, a name is no LoRA matrix, one stands alone or does not fit the other one, or what
            scales them is no number.
    """
    content = _content(folder / CONFIG)
    tensors = base.tensors(folder)
    sides: dict[str, set[str]] = {"A": set(), "B": set()}
    for name in tensors.shapes:
        match = re.match(rf"^{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight$", name)
        if not match:
            raise RunError(f"{folder / WEIGHTS}: {name} is no matrix of plain LoRA")
        sides[match[2]].add(match[1])
    if not tensors.shapes:
        raise RunError(f"{folder / WEIGHTS}: no tensor in it, so nothing is adapted; give a PEFT adapter folder")
    if alone := sides["A"] ^ sides["B"]:
        raise RunError(f"{folder / WEIGHTS}: {min(alone)} has one of lora_A and lora_B only")
    for module in sides["A"]:
        a, b = (tensors.shapes[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise RunError(
                f"{folder / WEIGHTS}: {module} has lora_A {list(a)} and lora_B {list(b)}, which make no matrix"
            )
    return Folder(tensors, content, sorted(sides["A"]))


def _content(file: Path) -> dict[str, Any]:
    content = json_file(file, "give a PEFT adapter folder")
    patterns = [content.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise RunError(f"{file}: rank_pattern and alpha_pattern are no objects; convert the adapter again")
    scales = {name: content.get(name) for name in ("r", "lora_alpha")}
    for name, value in [*scales.items(), *(item for pattern in patterns for item in pattern.items())]:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value) or value <= 0:
            raise RunError(
                f"{file}: {name} is {str(value)[:80]}, a positive number is needed; convert the adapter again"
            )
    for key in (key for pattern in patterns for key in pattern):
        try:
            re.compile(key)
        except re.error as error:
            raise RunError(f"{file}: {key[:80]} is no pattern ({error}); convert the adapter again") from error
    return content
