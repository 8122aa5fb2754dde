"""The router bias of dots.llm1 takes the model's dtype, so that bf16 rounds it."""

from __future__ import annotations

from ultra_patches.bias.compile_salt import salted_by
from ultra_patches.bias.vllm_block import keep_fp32
from ultra_patches.bias.vllm_block import probe as probe_block
from ultra_patches.patch import Finding, Patch, Target, Variant

_MODULE, _CLASS, _BIAS = "vllm.model_executor.models.dots1", "Dots1MoE", "e_score_correction_bias"


def probe() -> Finding:
    """Write two close biases into the block of a bf16 model."""
    return probe_block(
        _MODULE,
        _CLASS,
        _BIAS,
        moe_intermediate_size=8,
        n_routed_experts=2,
        n_shared_experts=None,
        num_experts_per_tok=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        topk_method="noaux_tc",
        n_group=1,
        topk_group=1,
        scoring_func="sigmoid",
    )


PATCH = Patch(
    id="vllm-dots1-router-bias",
    title="The router bias of dots.llm1 is fp32 in vLLM too",
    upstream="vllm",
    description=(
        "`Dots1MoE` makes its router bias in the model's dtype. Checkpoints and trainers hold it in fp32; the default weight "
        "loader copies it without a word into bf16, so that biases which differ by less than their rounding choose experts "
        "in another order than in the trainer."
    ),
    who="dots.llm1 in bf16 or fp16, at the first load and at every weight update",
    origin="ultra-patches",
    bug="not reported upstream, corrected there without an issue that we found",
    upstream_pr="none found",
    pr_state="the model was removed in 0.24.0",
    removal="vllm < 0.24 is no longer supported",
    last_checked="2026-11-30",
    variants=(
        Variant("all", (Target(_MODULE, f"{_CLASS}.__init__", keep_fp32(_BIAS)), salted_by("vllm-dots1-router-bias"))),
    ),
    probe=probe,
    probe_after=(_MODULE,),
)
