"""Tiny models of every architecture the planner knows, and the layouts they are built on."""

from dataclasses import dataclass, field
from typing import Any

from examples import tiny_nemotron_h
from examples.planning.layout import Lora, Trainer

RANKS = 4

_LLAMA = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3 tied": _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    # Not a multiple of 64, to which vLLM pads.
    "qwen3 odd": _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 130},
    "qwen3-moe": _LLAMA
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "glm": _LLAMA
    | _EXPERTS
    | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True}
    | {"partial_rotary_factor": 0.5},
    "deepseek": _LLAMA
    | _EXPERTS
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8}
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"topk_method": "noaux_tc"},
    "nemotron": tiny_nemotron_h.config("ME*-ME*M", conv_kernel=4),
    "nemotron without experts": tiny_nemotron_h.config("M*-M", conv_kernel=4),
    # Two tensor-parallel ranks repeat the one group.
    "nemotron of one group": tiny_nemotron_h.config("M*-M", conv_kernel=4) | {"n_groups": 1},
}


@dataclass(frozen=True)
class Case:
    """A model on the ranks of `trainer`; `pad_vocab` and LoRA are in there."""

    model: str
    trainer: Trainer = field(default_factory=lambda: Trainer(RANKS))

    def __str__(self) -> str:
        sizes = {name: getattr(self.trainer, name) for name in ("tp", "pp", "ep", "etp")}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["dp"]
        extra = ["lora"] * bool(self.trainer.lora) + ["padded"] * self.trainer.pad_vocab
        return " ".join([self.model, *words, *extra])


def _on(model: str, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, **more: Any) -> Case:
    return Case(model, Trainer(RANKS, tp, pp, ep, etp, **more))


_ULTRA = Lora(8, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"))
CASES = [
    _on("qwen3"),
    _on("qwen3", tp=2),
    # More ranks than key-value heads.
    _on("qwen3", tp=4),
    _on("qwen3", tp=2, pp=2),
    _on("qwen3 tied"),
    _on("qwen3 tied", pp=2),
    _on("qwen3 odd", tp=4, pad_vocab=True),
    _on("qwen3-moe", pp=2, ep=2),
    _on("qwen3-moe", tp=2, ep=2, etp=2),
    _on("glm"),
    _on("glm", ep=2),
    _on("glm", tp=2, ep=4),
    _on("glm", tp=2, pp=2, ep=2),
    _on("deepseek", tp=2, pp=2, ep=2),
    _on("nemotron"),
    _on("nemotron", tp=2, ep=2),
    _on("nemotron", pp=2, ep=2),
    _on("nemotron", tp=2, pp=2, ep=2),
    _on("nemotron", pp=4),
    _on("nemotron", tp=2, ep=2, etp=2),
    _on("qwen3", tp=2, pp=2, lora=Lora(8)),
    _on("glm", tp=2, ep=2, lora=Lora(8)),
    _on("nemotron", tp=2, pp=2, ep=2, lora=_ULTRA),
    _on("nemotron", pp=2, ep=2, lora=Lora(4, ("*.layers.0.*.in_proj", "router", "fc1_latent_proj"))),
    _on("nemotron", ep=2, lora=Lora(4, ("linear_fc1", "linear_fc2"), share_expert_adapters=False)),
]
