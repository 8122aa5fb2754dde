"""Stand-ins that let Megatron build, wrap and convert models on one rank without a GPU. For processes of tests only.

They decide where tensors live and which of its own layers Megatron builds: no class or function of it is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def prepare() -> None:
    """Send CUDA calls to the CPU. Call it before Megatron is imported; does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    # Megatron takes whatever this gives as `device=`.
    torch.cuda.current_device = lambda: CPU
    torch.cuda.set_device = lambda _: None
    torch.cuda.synchronize = lambda _=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_rng_state = lambda _="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, _="cuda": torch.set_rng_state(state)
    torch.Tensor.cuda = _stay
    torch.nn.Module.cuda = _stay


def _stay(self: Any, *_: Any, **__: Any) -> Any:
    return self


def one_rank() -> Any:
    """A gloo group of this process alone, Megatron's groups in it, and the collection of them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    return ProcessGroupCollection.use_mpu_process_groups()


#: What a Bridge provider asks for that needs transformer-engine, fused kernels or CUDA streams.
_PLAIN: dict[str, Any] = {
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "cross_entropy_fusion_impl": "native",
}


def use_plain_layers(provider: Any) -> None:
    """Let a Bridge provider build GPT layers from core's own modules. They hold every weight, and do not run forward."""
    for name, value in _PLAIN.items():
        if not hasattr(provider, name):
            raise AttributeError(f"{type(provider).__name__} has no {name}")
        setattr(provider, name, value)
    provider.transformer_layer_spec = _plain_block


def _plain_block(config: Any, **_: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:
        # Core's own attention cannot be built for MLA (TypeError: k_channels); it has no weights.
        layer.submodules.self_attention.submodules.core_attention = _NoAttention
    return block


class _NoAttention(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
