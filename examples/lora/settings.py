"""How the adapters were trained: the `peft` section of a run's configuration, as Megatron-Bridge writes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.errors import RunError

#: The classes of megatron.bridge.peft whose adapters are two matrices beside a weight.
_PLAIN_LORA = ("LoRA", "VLMLoRA", "CanonicalLoRA")


@dataclass(frozen=True)
class Settings:
    """`merged = base + alpha / rank * B @ A`; dropout is that of LoRA's input in training."""

    rank: int
    alpha: int | float
    dropout: float
    #: Experts have rank / (experts per token), and the same alpha (Bridge's `normalize_moe_lora`).
    smaller_experts: bool
    #: "pre" or "post": dropout of LoRA's input, which PEFT has, or of its output, which it does not.
    dropout_position: str


def settings(run_config: Mapping[str, Any]) -> Settings:
    """Read them from a run configuration.

    Raises:
        RunError: no such section, another method than LoRA, or a value that is absent or makes no sense.
    """
    file, peft = run_config["file"], run_config.get("peft")
    if not isinstance(peft, Mapping):
        raise RunError(f"{file}: no `peft` section, so that run trained no adapter; give the checkpoint of a LoRA run")
    kind = str(peft.get("_target_", "")).rpartition(".")[2]
    if kind not in _PLAIN_LORA:
        raise RunError(
            f"{file}: peft._target_ is {repr(peft.get('_target_'))[:80]}; only {', '.join(_PLAIN_LORA)} become PEFT LoRA"
        )
    rank, alpha, dropout = (_number(file, peft, name) for name in ("dim", "alpha", "dropout"))
    if rank != int(rank) or rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise RunError(
            f"{file}: peft has dim {rank}, alpha {alpha}, dropout {dropout}; expected 1…, above 0, 0 to below 1"
        )
    return Settings(
        rank=int(rank),
        alpha=alpha,
        dropout=float(dropout),
        smaller_experts=bool(peft.get("normalize_moe_lora", False)),
        dropout_position=str(peft.get("dropout_position", "pre")),
    )


def _number(file: str, peft: Mapping[str, Any], name: str) -> int | float:
    value = peft.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RunError(f"{file}: peft.{name} is {repr(value)[:80]}, a number is needed")
    if not is_finite(value):
        raise RunError(f"{file}: peft.{name} is {repr(value)[:80]}, a finite number is needed")
    return value


def is_finite(value: float) -> bool:
    """Whether it is a number that a float holds, which 10**400 is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
