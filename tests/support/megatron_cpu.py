"""Megatron on one rank without a GPU, for processes of tests: what the GRPO example stands in for, and what a probe of weights
needs besides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from examples.grpo import megatron_on_cpu, plain_layers


def prepare() -> None:
    """Send CUDA calls to the CPU. Call it before Megatron is imported; does nothing where there is a GPU."""
    if not torch.cuda.is_available():
        megatron_on_cpu.prepare()


def one_rank() -> Any:
    """A gloo group of this process alone, Megatron's groups in it, and the collection of them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    return ProcessGroupCollection.use_mpu_process_groups()


def use_plain_layers(provider: Any) -> None:
    """Let a Bridge provider build GPT layers from core's own modules. They hold every weight, and do not run forward."""
    plain_layers.use(provider)
    provider.use_cpu_initialization = True
    built = provider.transformer_layer_spec
    provider.transformer_layer_spec = lambda config, **options: _without_attention(built(config, **options))


def _without_attention(block: Any) -> Any:
    for layer in block.layer_specs:
        # Core's own attention cannot be built for MLA (TypeError: k_channels); it has no weights.
        layer.submodules.self_attention.submodules.core_attention = _NoAttention
    return block


class _NoAttention(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
