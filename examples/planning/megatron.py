"""How many parameters a Megatron rank holds, as Megatron-Bridge 0.6.2 builds the model from core 0.19.2's layers.

Ranks of a pipeline stage hold the same number. Without multi-token prediction and virtual pipeline stages.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from examples.planning.layout import Lora, Trainer
from examples.planning.model import Model
from examples.planning.weights import Block, Weight


@dataclass(frozen=True)
class Stage:
    """Parameters a rank of one pipeline stage: of the model, and of LoRA's adapters."""

    index: int
    layers: range
    dense: int
    experts: int
    dense_adapters: int = 0
    expert_adapters: int = 0

    @property
    def base(self) -> int:
        """Of the model."""
        return self.dense + self.experts

    @property
    def adapters(self) -> int:
        """Of LoRA."""
        return self.dense_adapters + self.expert_adapters

    @property
    def parameters(self) -> int:
        """Of both."""
        return self.base + self.adapters


def stages(model: Model, trainer: Trainer) -> list[Stage]:
    """Every pipeline stage. The sizes must have passed `checks`."""
    count = len(model.layers) // trainer.pp
    return [_stage(model, trainer, index, range(index * count, (index + 1) * count)) for index in range(trainer.pp)]


def _stage(model: Model, trainer: Trainer, index: int, layers: range) -> Stage:
    weights = [weight for layer in layers for weight in model.layers[layer] if weight.trained]
    dense = sum(_share(weight, trainer) for weight in weights if not weight.routed)
    dense += _ends(model, trainer, first=index == 0, last=index == trainer.pp - 1)
    adapters = list(_adapters(model, trainer, trainer.lora, layers)) if trainer.lora else []
    return Stage(
        index,
        layers,
        dense,
        sum(_share(weight, trainer) for weight in weights if weight.routed),
        sum(size for size, routed in adapters if not routed),
        sum(size for size, routed in adapters if routed),
    )


def _share(weight: Weight, trainer: Trainer) -> int:
    if weight.routed:
        return weight.total // (trainer.ep * trainer.etp)
    return weight.numel // trainer.tp if weight.units else weight.numel


def _ends(model: Model, trainer: Trainer, *, first: bool, last: bool) -> int:
    """Embedding on the first stage, final norm and head on the last, where a tied head is a copy unless it is the first."""
    rows = padded_vocab(model, trainer) // trainer.tp * model.hidden
    head = last and not (model.tied and first)
    return rows * (first + head) + (model.hidden if last else 0)


def padded_vocab(model: Model, trainer: Trainer) -> int:
    """Rows of the embedding: Bridge's largest power of two up to 128 that divides them, times TP, where it pads at all."""
    if not trainer.pad_vocab:
        return model.vocab
    multiple = math.gcd(model.vocab, 128) * trainer.tp
    return -(-model.vocab // multiple) * multiple


def _adapters(model: Model, trainer: Trainer, lora: Lora, layers: range) -> Iterator[tuple[int, bool]]:
    """Parameters of each adapter on a rank: A is [dim, in] and B [out, dim], both split by TP, or ETP in the experts."""
    for place, index in enumerate(layers):
        for module, weights in linears(model.layers[index]).items():
            # Bridge matches the names of a rank's own modules, whose layers count from its stage's first.
            if not lora.adapts(f"decoder.layers.{place}.{module}"):
                continue
            ends = weights[0].shape[1] + sum(weight.shape[0] for weight in weights)
            if not weights[0].routed:
                yield lora.dim * ends // trainer.tp, False
                continue
            copies = 1 if lora.share_expert_adapters else weights[0].experts // trainer.ep
            yield lora.dim * ends // trainer.etp * copies, True


def linears(layer: Block) -> dict[str, list[Weight]]:
    """The matrices of each of Megatron's linears of a layer; their rows are stacked there."""
    found: dict[str, list[Weight]] = {}
    for weight in layer:
        if weight.module and len(weight.shape) == 2:
            found.setdefault(weight.module, []).append(weight)
    return found


def bytes_of(stage: Stage, trainer: Trainer) -> dict[str, int]:
    """Bytes a GPU: weights, gradients (Megatron's reduce buffers) and the distributed optimizer's share.

    The optimizer of dense weights is sharded over DP, of routed experts over the ranks that have the same ones. Buffers'
    padding (core/optimizer/param_layout.py: below 64 elements a parameter and a bucket) is left out.
    """
    dense, experts = (stage.dense_adapters, stage.expert_adapters) if trainer.lora else (stage.dense, stage.experts)
    sharded = -(-dense // trainer.dp) - (-experts // trainer.expert_dp)
    state = trainer.main_bytes + 2 * trainer.moment_bytes
    return {
        "weights": stage.parameters * trainer.weight_bytes,
        "gradients": (dense + experts) * trainer.grad_bytes,
        "optimizer": 0 if trainer.optimizer_on_host else sharded * state,
    }
