"""What must divide what, by the rules of Megatron-Core 0.19.2 and vLLM 0.32.0, with what to choose where it does not."""

from collections.abc import Iterator
from dataclasses import dataclass

from examples.planning.layout import Layout, Rollout, Trainer
from examples.planning.model import MEGATRON_CONV_KERNEL, Model
from examples.planning.vllm import partition
from examples.planning.weights import Units

#: Larger tensor-parallel sizes are not proposed.
LARGEST = 64


@dataclass(frozen=True)
class Check:
    """One rule and what was found; `advice` is what to choose next, empty where the rule holds."""

    rule: str
    found: str
    advice: str = ""

    @property
    def holds(self) -> bool:
        """Whether the layout can be built as far as this rule goes."""
        return not self.advice


def check(model: Model, layout: Layout) -> list[Check]:
    """Every rule that applies to the model and the layout."""
    return [*_ranks(model, layout), *_trainer(model, layout.trainer), *_rollout(model, layout.rollout)]


def _divides(side: str, what: str, size: int, of: str, total: int, advice: str) -> Check:
    holds = total % size == 0
    return Check(
        f"{side}: {what} | {of}", f"{size} {'divides' if holds else 'does not divide'} {total}", "" if holds else advice
    )


def _divisors(number: int, limit: int = LARGEST) -> str:
    return ", ".join(str(size) for size in range(1, min(number, limit) + 1) if number % size == 0)


def _ranks(model: Model, layout: Layout) -> Iterator[Check]:
    trainer, rollout = layout.trainer, layout.rollout
    yield _divides(
        "Megatron", "TP x PP", trainer.tp * trainer.pp, "GPUs", trainer.gpus,
        f"choose TP x PP among {_divisors(trainer.gpus, trainer.gpus)}",
    )  # fmt: skip
    if trainer.gpus % trainer.pp == 0:
        yield _divides(
            "Megatron", "EP x ETP", trainer.ep * trainer.etp, "GPUs of a stage (TP x DP)", trainer.stage_gpus,
            f"choose EP x ETP among {_divisors(trainer.stage_gpus, trainer.stage_gpus)}, or another PP",
        )  # fmt: skip
    yield _divides(
        "vLLM", "TP x PP", rollout.tp * rollout.pp, "GPUs", rollout.gpus,
        f"choose vLLM's TP x PP among {_divisors(rollout.gpus, rollout.gpus)}",
    )  # fmt: skip
    if layout.colocated:
        same = trainer.gpus == rollout.gpus
        found = f"{rollout.gpus} of vLLM, {trainer.gpus} of Megatron"
        yield Check(
            "colocated: the same GPUs", found, "" if same else f"give vLLM {trainer.gpus} GPUs, or separate them"
        )
        yield _largest_tensor(model, layout)


def _largest_tensor(model: Model, layout: Layout) -> Check:
    """vLLM's packed IPC producer raises ValueError for a tensor above its buffer (packed_tensor.py)."""
    size = max(model.tensors.values()) * layout.trainer.weight_bytes
    mib = -(-size // (1 << 20))
    holds = not layout.sync.packed or mib <= layout.sync.buffer_mib
    return Check(
        "vLLM ipc: largest tensor fits sync.buffer_mib",
        f"{mib} MiB, the buffer has {layout.sync.buffer_mib} MiB",
        "" if holds else f"set sync.buffer_mib to at least {mib}",
    )


def _units(model: Model, *, routed: bool) -> list[Units]:
    """What tensor parallelism deals out, each once."""
    found = {
        weight.units: None for layer in model.layers for weight in layer if weight.units and weight.routed == routed
    }
    return [units for units in found if units]


def _megatron_cuts(units: Units, tp: int) -> bool:
    """Key-value heads may be fewer than ranks; Mamba groups may not (core/ssm/mamba_mixer.py)."""
    return units.count % tp == 0 or (units.name == "key-value heads" and tp % units.count == 0)


def _vllm_cuts(units: Units, tp: int) -> bool:
    """Mamba groups are repeated only where there is one (mamba_mixer2.py), key-value heads wherever they divide."""
    if units.name == "Mamba groups" and units.count == 1:
        return True
    return _megatron_cuts(units, tp)


def _cut(side: str, size_name: str, size: int, units: list[Units], allowed: object) -> Iterator[Check]:
    cuts = _vllm_cuts if side == "vLLM" else _megatron_cuts
    good = ", ".join(str(tp) for tp in range(1, LARGEST + 1) if all(cuts(one, tp) for one in units))
    for one in units:
        holds = cuts(one, size)
        how = "deals out" if one.count % size == 0 else "repeats" if side == "vLLM" else "splits"
        found = f"{size} {how if holds else 'does not divide'} {one.count}"
        yield Check(
            f"{side}: {size_name} | {one.name}",
            found,
            "" if holds else f"choose {side}'s {size_name} among {good}{allowed}",
        )


def _trainer(model: Model, trainer: Trainer) -> Iterator[Check]:
    yield from _cut("Megatron", "TP", trainer.tp, _units(model, routed=False), "")
    if not trainer.pad_vocab:
        yield _divides("Megatron", "TP", trainer.tp, "vocabulary", model.vocab, "set the provider's should_pad_vocab")
    yield _divides(
        "Megatron", "PP", trainer.pp, "layers", len(model.layers),
        f"choose PP among {_divisors(len(model.layers))}: Megatron-Core splits layers evenly",
    )  # fmt: skip
    if model.experts:
        yield _divides(
            "Megatron", "EP", trainer.ep, "experts", model.experts, f"choose EP among {_divisors(model.experts, 512)}"
        )
        yield from _cut("Megatron", "ETP", trainer.etp, _units(model, routed=True), "")
        if trainer.tp > 1 and trainer.ep > 1:
            advice = "" if trainer.sequence_parallel else "set trainer.sequence_parallel"
            found = "on" if trainer.sequence_parallel else "off"
            yield Check("Megatron: sequence parallel where TP and EP exceed 1", found, advice)
    elif trainer.ep * trainer.etp > 1:
        yield Check(
            "Megatron: EP and ETP need experts",
            f"EP {trainer.ep}, ETP {trainer.etp}, no experts",
            "choose EP 1 and ETP 1",
        )
    if model.conv_kernel is not None:
        holds = model.conv_kernel == MEGATRON_CONV_KERNEL
        advice = "" if holds else "use a model of conv_kernel 4: Megatron-Core's MambaMixer builds no other"
        yield Check(
            f"Megatron: Mamba2 convolution of {MEGATRON_CONV_KERNEL}", f"conv_kernel {model.conv_kernel}", advice
        )
    if trainer.lora:
        yield _divides("LoRA", "TP", trainer.tp, "dim", trainer.lora.dim, f"choose a dim that {trainer.tp} divides")
        names = {
            weight.module for layer in model.layers for weight in layer if weight.module and len(weight.shape) == 2
        }
        matched = {name for name in names if trainer.lora.adapts(f"decoder.layers.0.{name}")}
        advice = (
            "" if matched else f"choose targets among {', '.join(sorted({name.rpartition('.')[2] for name in names}))}"
        )
        yield Check("LoRA: targets are linears of the model", f"{len(matched)} of {len(names)} match", advice)


def _rollout(model: Model, rollout: Rollout) -> Iterator[Check]:
    units = _units(model, routed=False) + ([] if rollout.expert_parallel else _units(model, routed=True))
    yield from _cut("vLLM", "TP", rollout.tp, units, "")
    padded = -(-model.vocab // 64) * 64
    yield _divides("vLLM", "TP", rollout.tp, "vocabulary, padded to 64", padded, f"choose TP among {_divisors(padded)}")
    holds = rollout.pp <= len(model.layers)
    advice = "" if holds else f"choose vLLM's PP up to {len(model.layers)}"
    yield Check("vLLM: PP <= layers", f"{rollout.pp} and {len(model.layers)}", advice)
    if model.experts and rollout.pp > 1 and holds:
        yield _experts_everywhere(model, rollout)


def _experts_everywhere(model: Model, rollout: Rollout) -> Check:
    """A stage without experts fails when the model is built (`assert example_moe is not None` in models/nemotron_h.py)."""
    without = [
        stage
        for stage, layers in enumerate(partition(len(model.layers), rollout.pp))
        if not any(weight.routed for layer in layers for weight in model.layers[layer])
    ]
    found = f"none on stage {without[0]}" if without else f"on all {rollout.pp} stages"
    return Check("vLLM: experts on every stage", found, "choose a smaller PP for vLLM" if without else "")
