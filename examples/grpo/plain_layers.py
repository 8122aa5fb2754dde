"""Megatron without transformer-engine: core's own layers ("local") and no fused kernels. Slow; for CPU and small tests."""

from collections.abc import Iterator
from typing import Any

import torch

from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

#: What a provider of Megatron-Bridge asks for and only transformer-engine or fused kernels have.
PLAIN: dict[str, Any] = {
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "cross_entropy_fusion_impl": "native",
}


def prepare() -> None:
    """Call it before Megatron-Bridge is imported, which imports transformer-engine where it never uses it."""
    stand_in_for_gpu_packages()
    _map_local_experts()
    import megatron.bridge.peft.utils as peft

    # Without transformer-engine some of its names are None in core, which Bridge's LoRA takes for classes (0.6.2).
    peft.HAVE_TE = False


def use(provider: Any) -> None:
    """Let a provider of Megatron-Bridge build its decoder from core's own layers."""
    for name, value in PLAIN.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.transformer_layer_spec = _local_block


def adam_states(optimizer: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The state of torch's Adam for each parameter, made where there was no step yet.

    Without transformer-engine Megatron neither makes it before it loads a checkpoint nor restores the step count in it
    (core/optimizer/distrib_optimizer.py, 0.19.2).
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter in (one for group in part.optimizer.param_groups for one in group["params"]):
            state = part.optimizer.state[parameter]
            if not state:
                state |= {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                state["step"] = torch.tensor(0.0)
            yield state


def _local_block(config: Any, **_: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")


def _map_local_experts() -> None:
    """Let Megatron-Bridge's GLM-4.5 convert core's own experts too: it names those of transformer-engine alone."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
    from megatron.bridge.models.glm.glm45_bridge import GLM45Bridge

    released = GLM45Bridge.mapping_registry
    experts = "decoder.layers.*.mlp.experts.local_experts.*.linear_{}.weight"
    hf = "model.layers.*.mlp.experts.*.{}_proj.weight"

    def mapping_registry(self: Any) -> Any:
        return MegatronMappingRegistry(
            *released(self).mappings,
            GatedMLPMapping(megatron_param=experts.format("fc1"), gate=hf.format("gate"), up=hf.format("up")),
            AutoMapping(megatron_param=experts.format("fc2"), hf_param=hf.format("down")),
        )

    GLM45Bridge.mapping_registry = mapping_registry
