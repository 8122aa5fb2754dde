"""A model as its Hugging Face config.json describes it: the weights of every layer. Multi-token prediction is left out."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.errors import RunError
from examples.planning import weights
from examples.planning.weights import Block, Weight

#: Megatron-Core's MambaMixer has no other convolution (d_conv in core/ssm/mamba_mixer.py, 0.19.2).
MEGATRON_CONV_KERNEL = 4


@dataclass(frozen=True)
class Model:
    """`layers` has the weights of each layer with its norms; embedding and head are [vocab, hidden]."""

    architecture: str
    hidden: int
    vocab: int
    #: The head is the embedding.
    tied: bool
    layers: tuple[Block, ...]
    experts: int = 0
    conv_kernel: int | None = None
    mtp_layers: int = 0

    @property
    def embedding(self) -> Weight:
        """The embedding; the head has its shape."""
        return Weight("embedding", (self.vocab, self.hidden))

    @property
    def parameters(self) -> int:
        """Elements of the checkpoint, the router biases included, without multi-token prediction."""
        ends = (1 if self.tied else 2) * self.embedding.numel + self.hidden
        return ends + sum(weight.total for layer in self.layers for weight in layer)

    @property
    def tensors(self) -> dict[tuple[int, str], int]:
        """Elements of each tensor of the checkpoint by layer (-1: of none) and name; one a kind of expert."""
        sizes = {(-1, "embedding"): self.embedding.numel}
        for index, layer in enumerate(self.layers):
            for weight in layer:
                sizes[index, weight.tensor] = sizes.get((index, weight.tensor), 0) + weight.numel
        return sizes


def read(path: Path) -> Model:
    """Read a config.json. RunError says what is missing, or which architectures are known."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"model: cannot read {path} ({error.strerror}): give the config.json of a checkpoint") from error
    except ValueError as error:
        raise RunError(f"model: {path} is no JSON ({error}): give the config.json of a checkpoint") from error
    if not isinstance(values, dict):
        raise RunError(f"model: {path} holds no JSON object: give the config.json of a checkpoint")
    return from_config(values, str(path))


def from_config(values: dict[str, Any], where: str = "config") -> Model:
    """The model of a config's values."""
    names = values.get("architectures") or ["(none)"]
    if names[0] not in READERS:
        raise RunError(f"model: {where}: architecture {names[0]} is not known; known are {', '.join(sorted(READERS))}")
    try:
        return READERS[names[0]](values)
    except KeyError as error:
        raise RunError(f"model: {where}: no {error.args[0]}, which {names[0]} needs") from error
    except (TypeError, ValueError) as error:
        raise RunError(f"model: {where}: {error}") from error


def _ends(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "architecture": values["architectures"][0],
        "hidden": values["hidden_size"],
        "vocab": values["vocab_size"],
        "tied": bool(values.get("tie_word_embeddings", False)),
        "mtp_layers": values.get("num_nextn_predict_layers") or 0,
    }


def _nemotron_h(values: dict[str, Any]) -> Model:
    hidden = values["hidden_size"]
    if any(values.get(name) for name in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias")):
        raise ValueError("biases of linear layers are not counted: use_bias, mlp_bias and attention_bias must be false")
    blocks: dict[str, Callable[[], Block]] = {
        "M": lambda: weights.mamba(
            "mixer", hidden, values["mamba_num_heads"], values["mamba_head_dim"], values["n_groups"],
            values["ssm_state_size"], values["conv_kernel"],
        ),
        "*": lambda: weights.attention(
            "mixer", hidden, values["num_attention_heads"], values["num_key_value_heads"], _head_dim(values)
        ),
        "-": lambda: weights.mlp("mixer", hidden, values["intermediate_size"], gated=False),
        "E": lambda: weights.experts(
            "mixer", hidden, values["n_routed_experts"], values["moe_intermediate_size"], gated=False, bias=True,
            shared=values["moe_shared_expert_intermediate_size"] * (values.get("n_shared_experts") or 0),
            latent=values.get("moe_latent_size"), router_fp32="cpu",
        ),
    }  # fmt: skip
    pattern = _pattern(values)
    if unknown := set(pattern) - set(blocks):
        raise ValueError(f"hybrid_override_pattern has {min(unknown)!r}: known are {' '.join(blocks)}")
    made = {letter: (weights.norm("norm.weight", hidden), *blocks[letter]()) for letter in sorted(set(pattern))}
    return Model(
        **_ends(values),
        layers=tuple(made[letter] for letter in pattern),
        experts=values["n_routed_experts"] if "E" in pattern else 0,
        conv_kernel=values["conv_kernel"] if "M" in pattern else None,
    )


def _pattern(values: dict[str, Any]) -> str:
    """One letter a layer. Newer configs have words instead, and pipeline stages are parted by `|`."""
    if "layers_block_type" in values and "hybrid_override_pattern" not in values:
        letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
        return "".join(letters.get(word, word) for word in values["layers_block_type"])
    return str(values["hybrid_override_pattern"]).partition("/")[0].replace("|", "")


def _head_dim(values: dict[str, Any]) -> int:
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def _transformer(values: dict[str, Any], attention: Block, feed_forward: Callable[[int], Block], experts: int) -> Model:
    """Layers of attention and a feed-forward block, with a norm before each."""
    norms = [weights.norm(f"{name}_layernorm.weight", values["hidden_size"]) for name in ("input", "post_attention")]
    layers = tuple((*norms, *attention, *feed_forward(index)) for index in range(values["num_hidden_layers"]))
    return Model(**_ends(values), layers=layers, experts=experts)


def _grouped_query(values: dict[str, Any], *, bias: bool, qk_norm: bool) -> Block:
    heads = values["num_attention_heads"], values["num_key_value_heads"], _head_dim(values)
    return weights.attention("self_attn", values["hidden_size"], *heads, bias=bias, qk_norm=qk_norm)


def _qwen3(values: dict[str, Any]) -> Model:
    if values.get("attention_bias"):
        raise ValueError("attention_bias: Megatron-Bridge builds Qwen3 without")
    dense = weights.mlp("mlp", values["hidden_size"], values["intermediate_size"], gated=True)
    return _transformer(values, _grouped_query(values, bias=False, qk_norm=True), lambda _: dense, 0)


def _qwen3_moe(values: dict[str, Any]) -> Model:
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1 or values.get("attention_bias"):
        raise ValueError(
            "mlp_only_layers, decoder_sparse_step, attention_bias: Megatron-Bridge builds Qwen3-MoE without"
        )
    count = values["num_experts"] if "num_experts" in values else values["n_routed_experts"]
    inner = values["moe_intermediate_size"]
    moe = weights.experts("mlp", values["hidden_size"], count, inner, gated=True, bias=False)
    return _transformer(values, _grouped_query(values, bias=False, qk_norm=True), lambda _: moe, count)


def _glm4_moe(values: dict[str, Any]) -> Model:
    attention = _grouped_query(values, bias=bool(values.get("attention_bias")), qk_norm=bool(values.get("use_qk_norm")))
    return _transformer(values, attention, _dense_then_experts(values, "always"), values["n_routed_experts"])


def _deepseek_v3(values: dict[str, Any]) -> Model:
    attention = weights.latent_attention(
        values["hidden_size"], values["num_attention_heads"], values["q_lora_rank"], values["kv_lora_rank"],
        values["qk_nope_head_dim"], values["qk_rope_head_dim"], values["v_head_dim"],
    )  # fmt: skip
    return _transformer(values, attention, _dense_then_experts(values, "never"), values["n_routed_experts"])


def _dense_then_experts(values: dict[str, Any], router_fp32: Any) -> Callable[[int], Block]:
    """The first layers have an MLP, the others a mixture of experts with router biases."""
    inner, first = values["moe_intermediate_size"], values["first_k_dense_replace"]
    dense = weights.mlp("mlp", values["hidden_size"], values["intermediate_size"], gated=True)
    moe = weights.experts(
        "mlp", values["hidden_size"], values["n_routed_experts"], inner, gated=True, bias=True,
        shared=inner * (values.get("n_shared_experts") or 0), router_fp32=router_fp32,
    )  # fmt: skip
    return lambda index: dense if index < first else moe


READERS: dict[str, Callable[[dict[str, Any]], Model]] = {
    "NemotronHForCausalLM": _nemotron_h,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Glm4MoeForCausalLM": _glm4_moe,
    "DeepseekV3ForCausalLM": _deepseek_v3,
}
