"""LoRA: Megatron-Bridge's adapters in a frozen model, the policy without them, and what a checkpoint says of them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from examples.grpo.config import Peft


def is_adapter(name: str) -> bool:
    """Whether a parameter of Megatron's is an adapter's."""
    return ".adapter." in name


def add(provider: Any, wanted: Peft) -> None:
    """Let a provider put adapters into its model: after every hook before this one, which load weights and freeze."""
    from megatron.bridge.peft.lora import LoRA

    made = LoRA(**_fields(wanted))

    def wrap(model: Any) -> Any:
        adapted = made(model, training=True)
        made.set_params_to_save(adapted)
        return adapted

    provider.register_pre_wrap_hook(wrap)


def _fields(wanted: Peft) -> dict[str, Any]:
    fields = wanted.model_dump(exclude={"enabled"})
    return {**fields, "lora_dtype": wanted.lora_dtype and getattr(torch, wanted.lora_dtype)}


def run_config(wanted: Peft) -> dict[str, Any]:
    """The `peft` section of Megatron-Bridge's run_config.yaml, from which a converter takes dim, alpha and dropout."""
    return {"_target_": "megatron.bridge.peft.lora.LoRA", **wanted.model_dump(exclude={"enabled"})}


@contextlib.contextmanager
def without(model: list[Any]) -> Iterator[None]:
    """The base model: all adapters are zero for a while."""
    adapters = [value for part in model for name, value in part.named_parameters() if is_adapter(name)]
    kept = [value.detach().clone() for value in adapters]
    with torch.no_grad():
        try:
            for value in adapters:
                value.zero_()
            yield
        finally:
            for value, before in zip(adapters, kept, strict=True):
                value.copy_(before)


def describe(model: list[Any]) -> str:
    """How many parameters are adapters' and what share of all that is; RuntimeError where others would be trained."""
    named = [(name, value) for part in model for name, value in part.named_parameters()]
    if other := [name for name, value in named if value.requires_grad != is_adapter(name)]:
        raise RuntimeError(f"adapters alone are to be trained, and all of them; not so: {', '.join(other[:5])}")
    sizes = _global_sizes(model)
    trained = sum(size for name, size in sizes.items() if is_adapter(name))
    total = sum(sizes.values())
    return f"LoRA: {trained:,} of {total:,} parameters are trained ({100 * trained / total:.2f} %)"


def _global_sizes(model: list[Any]) -> dict[str, int]:
    """The number of values under each name in a checkpoint, over all ranks: what is replicated counts once."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.utils import unwrap_model

    state = {index: part.sharded_state_dict() for index, part in enumerate(unwrap_model(model))}
    apply_factories(state)
    mine = {
        tensor.key: torch.Size(tensor.global_shape).numel()
        for tensor in nested_values(state)
        if isinstance(tensor, ShardedTensor)
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {name: size for rank in ranks for name, size in rank.items()}
