"""The losses as Megatron's schedules call them: on one micro-batch, with the logits of the last pipeline stage."""

from typing import Any

import torch
from torch import Tensor

from examples.grpo import grpo

Batch = dict[str, Tensor]
"""`tokens` int64 [n, s]; `mask` fp32 [n, s - 1], 1 where token i + 1 counts; for GRPO `advantage` fp32 [n] and `old` fp32
[n, s - 1]. n is a multiple of data-parallel size times micro-batch size; rows of zero mask fill it up."""


def logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """fp32 [b, s - 1] from this rank's share of the vocabulary, [b, s, v / tp]."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # The next token of position i; the last position has none and is dropped.
    following = tokens.roll(-1, dims=1)
    return -vocab_parallel_cross_entropy(logits.float() / temperature, following)[:, :-1]


def scores(part: Batch, temperature: float, logits: Tensor, non_loss_data: bool = True) -> Tensor:  # noqa: ARG001 # Megatron's call
    """Log-probabilities alone, fp32 [b, s - 1], for a pass without gradients."""
    return logprobs(logits, part["tokens"], temperature)


def _summed(part: Batch, loss: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What Megatron's schedules want of a loss: its sum, the number of tokens, and what to report."""
    total, tokens = (loss * part["mask"]).sum(), part["mask"].sum()
    sums = torch.stack([total.detach(), (clipped * part["mask"]).sum(), tokens])
    return total, tokens.to(torch.int), {"sums": sums}


def supervised(part: Batch, temperature: float, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Cross-entropy of the tokens in the mask."""
    loss = -logprobs(logits, part["tokens"], temperature)
    return _summed(part, loss, torch.zeros_like(loss))


def clipped_policy(
    wanted: Any, part: Batch, temperature: float, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """GRPO's objective; `wanted` has clip_low, clip_high and kl."""
    new = logprobs(logits, part["tokens"], temperature)
    loss, clipped = grpo.objective(
        new, part["old"], part["advantage"], wanted.clip_low, wanted.clip_high, part.get("reference"), wanted.kl
    )
    return _summed(part, loss, clipped.float())
