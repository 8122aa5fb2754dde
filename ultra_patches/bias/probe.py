"""What the probes of the router bias share: 512 values as a trained model has them, and the judgement on what is left."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ultra_patches.patch import Finding, Verdict

if TYPE_CHECKING:
    import torch


def trained_bias() -> torch.Tensor:
    """512 fp32 values around 40.1 with a spread of 7e-4: about 360 are distinct, one in bf16."""
    import torch

    return 40.1 + 7e-4 * torch.randn(512, generator=torch.Generator().manual_seed(0))


def toy_router() -> tuple[Any, torch.Tensor]:
    """A Megatron module that holds `router.expert_bias` as core's TopKRouter does, and the values in it."""
    import torch
    from megatron.core.transformer.module import MegatronModule

    bias = trained_bias()
    model = MegatronModule(toy_config())
    model.router = torch.nn.Module()
    model.router.register_buffer("expert_bias", bias.clone())
    # Wraps call this after the conversion where they find it, which relabels what was rounded.
    model.router._maintain_float32_expert_bias = functools.partial(_relabel, model.router)
    return model, bias


def _relabel(router: Any) -> None:
    router.expert_bias.data = router.expert_bias.data.float()


def toy_config() -> Any:
    """The fields of a TransformerConfig that the wraps read."""
    return SimpleNamespace(
        fp16=False,
        bf16=True,
        virtual_pipeline_model_parallel_size=None,
        use_cpu_initialization=True,
        init_model_with_meta_device=False,
    )


def judge(model: Any, bias: torch.Tensor) -> Finding:
    """Compare the bias in a model with the one that was put in, value by value."""
    return compare(model.router.expert_bias, bias)


def compare(arrived: torch.Tensor, bias: torch.Tensor) -> Finding:
    """Exact equality, never a dtype or a count: fp32 itself has fewer distinct values than experts."""
    import torch

    left, right = arrived.unique().numel(), bias.unique().numel()
    label = str(arrived.dtype).removeprefix("torch.")
    if arrived.dtype is bias.dtype and torch.equal(arrived, bias):
        return Finding(Verdict.CLEAN, f"expert_bias exact, {right} distinct values")
    error = (arrived.double() - bias.double()).abs().max().item()
    return Finding(
        Verdict.DEFECT, f"expert_bias {right} -> {left} distinct values, max error {error:.3f}, labelled {label}"
    )
