"""Which rows of Megatron's fused linear layers belong to which of Hugging Face's separate ones."""

import torch
from torch import Tensor


def qkv(heads: int, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of q, k and v in a fused `linear_qkv`, each int64 [its rows].

    Megatron lays rows out by query group: the queries of a group, its key, its value, then the next group
    (`SelfAttention.get_query_key_value_tensors`, megatron/core/transformer/attention.py, 0.19.2).

    Raises:
        ValueError: the groups do not divide the heads.
    """
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} query groups do not divide {heads} heads")
    each = heads // groups
    rows = torch.arange((heads + 2 * groups) * head_dim).view(groups, each + 2, head_dim)
    return rows[:, :each].flatten(), rows[:, each].flatten(), rows[:, each + 1].flatten()


def halves(count: int) -> tuple[Tensor, Tensor]:
    """The rows of gate and up in a gated `linear_fc1`, each int64 [count / 2].

    A checkpoint holds the whole gate before the whole up, whatever the tensor-parallel size: each rank writes its two parts
    apart (`apply_swiglu_sharded_factory`, megatron/core/transformer/mlp.py, 0.19.2).

    Raises:
        ValueError: an odd number of rows.
    """
    if count % 2:
        raise ValueError(f"{count} rows have no two halves, gate and up")
    gate, up = torch.arange(count).chunk(2)
    return gate, up
