"""Put q, k and v together by Megatron-Bridge's own function and split them again by ours, for many sizes; prints how many."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.lora import rows
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

SEEN: set[tuple[int, int, int]] = set()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def split_is_the_inverse(each: int, groups: int, dim: int) -> None:
    from megatron.bridge.models.conversion.param_mapping import merge_qkv_weights

    config = SimpleNamespace(
        num_attention_heads=each * groups,
        num_query_groups=groups,
        kv_channels=dim,
        hidden_size=5,
        attention_output_gate=False,
    )
    sizes = (each * groups * dim, groups * dim, groups * dim)
    parts = torch.randn(sum(sizes), 5).split(sizes)
    fused = merge_qkv_weights(config, *parts)
    chosen = rows.qkv(each * groups, groups, dim)
    assert all(torch.equal(fused[mine], part) for mine, part in zip(chosen, parts, strict=True))
    SEEN.add((each, groups, dim))


if __name__ == "__main__":
    stand_in_for_gpu_packages()
    split_is_the_inverse()
    print(len(SEEN))
