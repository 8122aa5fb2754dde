"""After a sync the rollout computes something else than the trainer: whose weights, of which layers?

A fresh engine starts on what the trainer exports. Where its weights differ from those of the engine in use, the sync is at
fault, and the layers are named. Where they are the same, the export is wrong, or both compute differently from it.
"""

import re
from collections.abc import Sequence

from torch import Tensor


def differing(synced: Sequence[dict[str, str]], fresh: Sequence[dict[str, str]]) -> list[str]:
    """The names whose hash differs, or which one side alone has, over all workers."""
    found: set[str] = set()
    for left, right in zip(synced, fresh, strict=True):
        found |= {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def mean_difference(left: Tensor, right: Tensor, mask: Tensor) -> float:
    """Mean |left - right| over the tokens of the mask, all [n, s]; NaN and infinity stay what they are."""
    return float(((left - right).abs() * mask).sum() / mask.sum().clamp(min=1))


def explain(found: float, limit: float, names: Sequence[str], fresh: float) -> str:
    """What to tell the user. `fresh` is the difference between the trainer and the fresh engine."""
    head = f"after a weight sync trainer and rollout differ by mean |dlogp| {found:.4f}, more than sync.max_dlogp {limit:g}."
    if names:
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return (
            f"{head} An engine started on the same export differs by {fresh:.4f}; these weights of the rollout are not those "
            f"that were sent: {listed}. Type `ultra-patches verify` to see which defects this vLLM has"
        )
    return (
        f"{head} An engine started on the same export differs by {fresh:.4f} and holds the same weights: the sync is right. "
        "Either the export is not what the trainer has (type `ultra-patches verify`), or trainer and vLLM compute differently from "
        "it. dtype=float32 tells this from rounding; compare their configurations, or raise sync.max_dlogp"
    )
