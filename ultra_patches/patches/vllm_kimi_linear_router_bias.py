"""The router bias of Kimi Linear takes the model's dtype, so that bf16 rounds it."""

from __future__ import annotations

from ultra_patches.bias.compile_salt import salted_by
from ultra_patches.bias.vllm_block import keep_fp32
from ultra_patches.bias.vllm_block import probe as probe_block
from ultra_patches.patch import Finding, Patch, Target, Variant

_MODULE, _CLASS, _BIAS = "vllm.model_executor.models.kimi_linear", "KimiMoE", "e_score_correction_bias"


def probe() -> Finding:
    """Write two close biases into the block of a bf16 model."""
    return probe_block(
        _MODULE,
        _CLASS,
        _BIAS,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_experts=2,
        num_experts_per_token=1,
        moe_renormalize=True,
        routed_scaling_factor=1.0,
        num_shared_experts=None,
        use_grouped_topk=True,
        num_expert_group=1,
        topk_group=1,
        moe_router_activation_func="sigmoid",
    )


PATCH = Patch(
    id="vllm-kimi-linear-router-bias",
    title="The router bias of Kimi Linear is fp32 in vLLM too",
    upstream="vllm",
    description=(
        "`KimiMoE` makes its router bias in the model's dtype. Checkpoints and trainers hold it in fp32; the default weight "
        "loader copies it without a word into bf16, so that biases which differ by less than their rounding choose experts "
        "in another order than in the trainer."
    ),
    who="Kimi Linear in bf16 or fp16, at the first load and at every weight update",
    origin="ultra-patches",
    bug="not reported upstream, corrected there without an issue that we found",
    upstream_pr="none found",
    pr_state="the model moved to another module in 0.27.0",
    removal="vllm < 0.27 is no longer supported",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all", (Target(_MODULE, f"{_CLASS}.__init__", keep_fp32(_BIAS)), salted_by("vllm-kimi-linear-router-bias"))
        ),
    ),
    probe=probe,
    probe_after=(_MODULE,),
)
