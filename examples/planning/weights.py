"""The weights of each block of a model, and along what each is cut over GPUs.

Names and shapes are those of the Hugging Face checkpoint, which holds a tensor an expert. `module` is Megatron-Core's
linear that the weight becomes a part of (core 0.19.2), such as the three of `self_attention.linear_qkv`.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Units:
    """What tensor parallelism deals out whole: `count` of them."""

    name: str
    count: int


@dataclass(frozen=True)
class Weight:
    """One tensor, one of `experts` equal ones, or the `part` of a tensor that is cut in its own way. Shape [out, in]."""

    tensor: str
    shape: tuple[int, ...]
    module: str = ""
    #: None: every tensor-parallel rank has it whole.
    units: Units | None = None
    experts: int = 1
    routed: bool = False
    part: str = ""
    #: Megatron's linear takes an input that is split already, and splits no output.
    row_parallel: bool = False
    #: False: a buffer in Megatron, without gradient and optimizer; a parameter in vLLM all the same.
    trained: bool = True
    #: Where vLLM 0.32 keeps it in fp32 in a bf16 model.
    engine_fp32: Literal["never", "cpu", "always"] = "never"

    @property
    def numel(self) -> int:
        """Elements of one tensor; of one expert's where `routed`."""
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """Elements in the checkpoint."""
        return self.numel * self.experts


Block = tuple[Weight, ...]


def norm(tensor: str, size: int) -> Weight:
    """The scale of a norm; no tensor-parallel rank lacks any of it."""
    return Weight(tensor, (size,))


def attention(
    prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool = False, qk_norm: bool = False
) -> Block:
    """Grouped-query attention, without its input norm."""
    query, key = Units("attention heads", heads), Units("key-value heads", kv_heads)
    rows = {"q": (query, heads * head_dim), "k": (key, kv_heads * head_dim), "v": (key, kv_heads * head_dim)}
    qkv = "self_attention.linear_qkv"
    weights = [Weight(f"{prefix}.{p}_proj.weight", (n, hidden), qkv, units) for p, (units, n) in rows.items()]
    if bias:
        weights += [Weight(f"{prefix}.{p}_proj.bias", (n,), qkv, units) for p, (units, n) in rows.items()]
    if qk_norm:
        weights += [norm(f"{prefix}.{p}_norm.weight", head_dim) for p in "qk"]
    output = Weight(
        f"{prefix}.o_proj.weight", (hidden, heads * head_dim), "self_attention.linear_proj", query, row_parallel=True
    )
    return (*weights, output)


def latent_attention(
    hidden: int, heads: int, q_rank: int | None, kv_rank: int, nope: int, rope: int, value: int
) -> Block:
    """DeepSeek's multi-head latent attention, without its input norm."""
    prefix, module, units = "self_attn", "self_attention", Units("attention heads", heads)
    query = heads * (nope + rope)
    if q_rank is None:
        down: Block = (Weight(f"{prefix}.q_proj.weight", (query, hidden), f"{module}.linear_q_proj", units),)
    else:
        down = (
            Weight(f"{prefix}.q_a_proj.weight", (q_rank, hidden), f"{module}.linear_q_down_proj"),
            norm(f"{prefix}.q_a_layernorm.weight", q_rank),
            Weight(f"{prefix}.q_b_proj.weight", (query, q_rank), f"{module}.linear_q_up_proj", units),
        )
    return (
        *down,
        Weight(f"{prefix}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), f"{module}.linear_kv_down_proj"),
        norm(f"{prefix}.kv_a_layernorm.weight", kv_rank),
        Weight(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), kv_rank), f"{module}.linear_kv_up_proj", units),
        Weight(
            f"{prefix}.o_proj.weight", (hidden, heads * value), f"{module}.linear_proj", units, row_parallel=True
        ),
    )  # fmt: skip


def mlp(prefix: str, hidden: int, inner: int, *, gated: bool, module: str = "mlp", what: str = "MLP") -> Block:
    """Two projections, or three where gated."""
    units = Units(f"{what} channels", inner)
    up = ("gate", "up") if gated else ("up",)
    return (
        *(Weight(f"{prefix}.{name}_proj.weight", (inner, hidden), f"{module}.linear_fc1", units) for name in up),
        Weight(f"{prefix}.down_proj.weight", (hidden, inner), f"{module}.linear_fc2", units, row_parallel=True),
    )


def experts(
    prefix: str,
    hidden: int,
    count: int,
    inner: int,
    *,
    gated: bool,
    bias: bool,
    shared: int = 0,
    latent: int | None = None,
    router_fp32: Literal["never", "cpu", "always"] = "never",
) -> Block:
    """A mixture of experts: router, routed experts (of width `latent` where given), shared experts of `shared` channels."""
    weights: list[Weight] = [
        Weight(f"{prefix}.gate.weight", (count, hidden), "mlp.router", engine_fp32=router_fp32),
    ]
    if bias:
        name = f"{prefix}.gate.e_score_correction_bias"
        weights.append(Weight(name, (count,), trained=False, engine_fp32="always"))
    if latent:
        weights += [
            Weight(f"{prefix}.fc1_latent_proj.weight", (latent, hidden), "mlp.fc1_latent_proj"),
            Weight(f"{prefix}.fc2_latent_proj.weight", (hidden, latent), "mlp.fc2_latent_proj"),
        ]
    routed = mlp(
        f"{prefix}.experts.N", latent or hidden, inner, gated=gated, module="mlp.experts", what="routed expert"
    )
    weights += [replace(weight, experts=count, routed=True) for weight in routed]
    if shared:
        what, module = "shared expert", "mlp.shared_experts"
        weights += mlp(f"{prefix}.shared_experts", hidden, shared, gated=gated, module=module, what=what)
    return tuple(weights)


def mamba(prefix: str, hidden: int, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> Block:
    """A Mamba2 mixer with its gated norm, without the input norm. B and C are cut by groups, everything else by heads."""
    by_head, by_group = Units("Mamba heads", heads), Units("Mamba groups", groups)
    inner, shared = heads * head_dim, 2 * groups * state
    projection, convolution = f"{prefix}.in_proj.weight", f"{prefix}.conv1d"
    return (
        Weight(projection, (2 * inner + heads, hidden), "mixer.in_proj", by_head, part="z, x, dt"),
        Weight(projection, (shared, hidden), "mixer.in_proj", by_group, part="B, C"),
        Weight(f"{convolution}.weight", (inner, 1, kernel), "", by_head, part="x"),
        Weight(f"{convolution}.weight", (shared, 1, kernel), "", by_group, part="B, C"),
        Weight(f"{convolution}.bias", (inner,), "", by_head, part="x"),
        Weight(f"{convolution}.bias", (shared,), "", by_group, part="B, C"),
        Weight(f"{prefix}.A_log", (heads,), "", by_head, engine_fp32="always"),
        Weight(f"{prefix}.D", (heads,), "", by_head),
        Weight(f"{prefix}.dt_bias", (heads,), "", by_head),
        Weight(f"{prefix}.norm.weight", (inner,), "", by_head),
        Weight(f"{prefix}.out_proj.weight", (hidden, inner), "mixer.out_proj", by_head, row_parallel=True),
    )
