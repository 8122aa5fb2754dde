"""What a trainer rank keeps in a checkpoint: the model, or its adapters alone, the optimizer and the learning-rate schedule."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from examples.grpo import lora, plain_layers
from examples.grpo.policy import Policy


def save(policy: Policy, folder: Path) -> None:
    """Write a Megatron distributed checkpoint, on all ranks.

    With adapters its run_config.yaml says what they are, as Megatron-Bridge's does.
    """
    from megatron.core import dist_checkpointing

    if policy.rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(policy, is_loading=False), str(folder))
    if policy.rank == 0 and policy.config.peft.enabled:
        (folder / "run_config.yaml").write_text(yaml.safe_dump({"peft": lora.run_config(policy.config.peft)}))
    dist.barrier()


def load(policy: Policy, folder: Path) -> None:
    """Read what `save` wrote, every tensor and no other, on the same tensor-, pipeline- and expert-parallel sizes."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(_state(policy, is_loading=True), str(folder))
    for name, part in _parts(policy).items():
        # What is frozen is the base model's and is not in the checkpoint.
        missing, unexpected = part.load_state_dict(state[name], strict=not policy.config.peft.enabled)
        if unexpected or any(lora.is_adapter(key) for key in missing):
            raise RuntimeError(f"{folder}: adapters do not fit: missing {missing}, unexpected {unexpected}")
    # Megatron finds a group of parameters again by its learning rates, which are those of the checkpoint.
    policy.set_rates(state["scheduler"]["max_lr"], state["scheduler"]["min_lr"])
    policy.optimizer.load_state_dict(state["optimizer"])
    for adam in _adam(policy):
        adam["step"] = torch.tensor(state["adam_step"])
    policy.scheduler.load_state_dict(state["scheduler"])
    policy.set_rates(policy.scheduler.max_lr, policy.scheduler.min_lr)
    policy.scheduler.step(increment=0)


def _adam(policy: Policy) -> list[dict[str, torch.Tensor]]:
    return [] if policy.sizes.transformer_engine else list(plain_layers.adam_states(policy.optimizer))


def _parts(policy: Policy) -> dict[str, Any]:
    """The model as it is inside Megatron's wrappers, a part a virtual pipeline stage."""
    from megatron.core.utils import unwrap_model

    return {f"model{index}": part for index, part in enumerate(unwrap_model(policy.model))}


def _state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    steps = {float(adam["step"]) for adam in _adam(policy)}
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state: dict[str, Any] = {name: part.sharded_state_dict() for name, part in _parts(policy).items()}
    if policy.config.peft.enabled:
        state = {
            name: {key: value for key, value in part.items() if lora.is_adapter(key)} for name, part in state.items()
        }
    model = state["model0"] if len(state) == 1 else dict(state)
    state["optimizer"] = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    state["scheduler"] = policy.scheduler.state_dict()
    state["adam_step"] = max(steps, default=0.0)
    return state
