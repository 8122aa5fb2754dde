"""A random NemotronH checkpoint in the Hugging Face format, small enough to serve on any machine.

A pattern has one letter a layer: "M" is Mamba2, "*" attention, "-" an MLP, "E" a latent mixture of experts.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

DEFAULT_PATTERN = "M*M-"
# The real models have 4. On CPUs with bf16 vector instructions vLLM 0.32 packs convolution weights of that
# width, and a weight update then no longer reaches Mamba2 layers; other widths, and GPUs, are not affected.
DEFAULT_CONV_KERNEL = 3

# Kernels for GPUs work on larger tiles than 64 rows: 1 is for CPUs, 8 for GPUs.
SCALE = int(os.environ.get("TINY_NEMOTRON_H_SCALE", "1"))
VOCAB, HIDDEN, MLP = 512 * SCALE, 64 * SCALE, 128 * SCALE
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 32) if SCALE == 1 else (8, 2, 64)
MAMBA_HEADS, MAMBA_GROUPS = 8, 2
MAMBA_HEAD_DIM, MAMBA_STATE = (16, 16) if SCALE == 1 else (64, 64)
MAMBA_INNER = MAMBA_HEADS * MAMBA_HEAD_DIM
CONV_CHANNELS = MAMBA_INNER + 2 * MAMBA_GROUPS * MAMBA_STATE
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
LATENT, EXPERT_MLP, SHARED_MLP = 32 * SCALE, 32 * SCALE, 64 * SCALE


class _Sampler:
    """Draws tensors from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def noise(self, *shape: int) -> Tensor:
        """fp32 [*shape], standard normal."""
        return torch.randn(*shape, generator=self._generator)

    def matrix(self, *shape: int, scale: float | None = None) -> Tensor:
        """bf16 [*shape], normal with the given scale, else with 1 / sqrt(last dimension)."""
        return (self.noise(*shape) * (scale or 1 / math.sqrt(shape[-1]))).to(torch.bfloat16)

    def norm(self, size: int) -> Tensor:
        """bf16 [size], near one. Not exactly one: equal tensors would hide a missing update."""
        return (1 + 0.1 * self.noise(size)).to(torch.bfloat16)


def _mamba(sample: _Sampler, conv_kernel: int) -> dict[str, Tensor]:
    """The tensors of one Mamba2 mixer: A_log fp32 [heads], the others bf16."""
    return {
        "A_log": torch.arange(1, MAMBA_HEADS + 1).log() + 0.5 * sample.noise(MAMBA_HEADS),
        "D": sample.matrix(MAMBA_HEADS, scale=1.0),
        "dt_bias": sample.matrix(MAMBA_HEADS, scale=1.0),
        "conv1d.weight": sample.matrix(CONV_CHANNELS, 1, conv_kernel),
        "conv1d.bias": sample.matrix(CONV_CHANNELS, scale=0.1),
        "in_proj.weight": sample.matrix(MAMBA_INNER + CONV_CHANNELS + MAMBA_HEADS, HIDDEN),
        "norm.weight": sample.norm(MAMBA_INNER),
        "out_proj.weight": sample.matrix(HIDDEN, MAMBA_INNER),
    }


def _attention(sample: _Sampler, _conv_kernel: int) -> dict[str, Tensor]:
    """The bf16 projections of one attention mixer, each [out, in]."""
    return {
        "q_proj.weight": sample.matrix(HEADS * HEAD_DIM, HIDDEN),
        "k_proj.weight": sample.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj.weight": sample.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "o_proj.weight": sample.matrix(HIDDEN, HEADS * HEAD_DIM),
    }


def _mlp(sample: _Sampler, _conv_kernel: int) -> dict[str, Tensor]:
    """The bf16 projections of one MLP mixer, each [out, in]."""
    return {"up_proj.weight": sample.matrix(MLP, HIDDEN), "down_proj.weight": sample.matrix(HIDDEN, MLP)}


def _experts(sample: _Sampler, _conv_kernel: int) -> dict[str, Tensor]:
    """The tensors of one latent MoE mixer: the router bias fp32 [experts], the others bf16 [out, in]."""
    tensors = {
        "gate.weight": sample.matrix(EXPERTS, HIDDEN),
        # Far from zero, where bf16 has steps of 0.125: a bias that went through bf16 picks other experts.
        "gate.e_score_correction_bias": 20 + 0.1 * sample.noise(EXPERTS),
        "fc1_latent_proj.weight": sample.matrix(LATENT, HIDDEN),
        "fc2_latent_proj.weight": sample.matrix(HIDDEN, LATENT),
        "shared_experts.up_proj.weight": sample.matrix(SHARED_MLP, HIDDEN),
        "shared_experts.down_proj.weight": sample.matrix(HIDDEN, SHARED_MLP),
    }
    for expert in range(EXPERTS):
        tensors[f"experts.{expert}.up_proj.weight"] = sample.matrix(EXPERT_MLP, LATENT)
        tensors[f"experts.{expert}.down_proj.weight"] = sample.matrix(LATENT, EXPERT_MLP)
    return tensors


_MIXERS: dict[str, Callable[[_Sampler, int], dict[str, Tensor]]] = {
    "M": _mamba,
    "*": _attention,
    "-": _mlp,
    "E": _experts,
}


def _check(pattern: str) -> None:
    if not pattern or set(pattern) - set(_MIXERS):
        raise ValueError(f"layer pattern {pattern!r}: expected one or more of {' '.join(_MIXERS)}")


def config(pattern: str = DEFAULT_PATTERN, conv_kernel: int = DEFAULT_CONV_KERNEL) -> dict[str, Any]:
    """The content of config.json for a layer pattern."""
    _check(pattern)
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "mlp_hidden_act": "relu2",
        "max_position_embeddings": 512,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "mamba_num_heads": MAMBA_HEADS,
        "mamba_head_dim": MAMBA_HEAD_DIM,
        "n_groups": MAMBA_GROUPS,
        "ssm_state_size": MAMBA_STATE,
        "conv_kernel": conv_kernel,
        "expand": MAMBA_INNER // HIDDEN,
        "chunk_size": 16,
        "use_conv_bias": True,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_shared_experts": 1,
        "moe_latent_size": LATENT,
        "moe_intermediate_size": EXPERT_MLP,
        "moe_shared_expert_intermediate_size": SHARED_MLP,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def weights(
    seed: int = 0,
    pattern: str = DEFAULT_PATTERN,
    conv_kernel: int = DEFAULT_CONV_KERNEL,
) -> dict[str, Tensor]:
    """All tensors in checkpoint order, bf16 but for A_log and the router bias (fp32).

    Every tensor depends on the seed, so that one which a sync forgets shows in the outputs.
    """
    _check(pattern)
    sample = _Sampler(seed)
    tensors = {"backbone.embeddings.weight": sample.matrix(VOCAB, HIDDEN, scale=1.0)}
    for layer, kind in enumerate(pattern):
        prefix = f"backbone.layers.{layer}."
        tensors[prefix + "norm.weight"] = sample.norm(HIDDEN)
        mixer = _MIXERS[kind](sample, conv_kernel)
        tensors |= {f"{prefix}mixer.{name}": tensor for name, tensor in mixer.items()}
    tensors["backbone.norm_f.weight"] = sample.norm(HIDDEN)
    tensors["lm_head.weight"] = sample.matrix(VOCAB, HIDDEN)
    return tensors


def save(
    folder: str | Path,
    seed: int = 0,
    pattern: str = DEFAULT_PATTERN,
    conv_kernel: int = DEFAULT_CONV_KERNEL,
) -> Path:
    """Write config.json and model.safetensors into the folder, which is made if absent; returns it."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(pattern, conv_kernel), indent=1) + "\n")
    save_file(weights(seed, pattern, conv_kernel), path / "model.safetensors", metadata={"format": "pt"})
    return path
