"""GRPO's arithmetic: advantages within a group, the clipped objective, the KL penalty. Tensors in, tensors out."""

import torch
from torch import Tensor


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Group-normalised advantages, fp32 [n], of rewards fp32 [n] whose consecutive `group` entries belong together.

    (r - mean) / (std + 1e-6) within a group, with the unbiased std (Shao et al. 2024, section 4.1.1). A group without
    spread gets exact zeros: it says nothing about which answer is better.
    """
    groups = rewards.view(-1, group)
    spread = groups.std(dim=1, keepdim=True)
    normal = (groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-6)
    return torch.where(spread > 0, normal, torch.zeros_like(normal)).view(-1)


def objective(
    new: Tensor, old: Tensor, advantage: Tensor, clip_low: float, clip_high: float, reference: Tensor | None, kl: float
) -> tuple[Tensor, Tensor]:
    """The loss and whether it is clipped, for each token [b, s].

    `new`, `old` and `reference` are log-probabilities [b, s] under the policy in training, the one that sampled, and the
    reference; `advantage` is [b]. The penalty is the estimator exp(d) - d - 1 with d = reference - new (Schulman 2020).
    """
    ratio = torch.exp(new - old)
    gain = advantage[:, None]
    plain, clipped = ratio * gain, ratio.clamp(1 - clip_low, 1 + clip_high) * gain
    loss = -torch.minimum(plain, clipped)
    if reference is not None:
        difference = reference - new
        loss = loss + kl * (torch.exp(difference) - difference - 1)
    return loss, clipped < plain
