"""The split of fused rows, against a second formulation and against Megatron-Bridge's own interleaving."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.lora import rows

sizes = st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))


@given(sizes)
def test_each_group_has_its_queries_then_its_key_then_its_value(size: tuple[int, int, int]) -> None:
    each, groups, dim = size
    expected: dict[str, list[int]] = {"q": [], "k": [], "v": []}
    row = 0
    for _ in range(groups):
        for kind in ["q"] * each + ["k", "v"]:
            expected[kind] += range(row, row + dim)
            row += dim
    assert [part.tolist() for part in rows.qkv(each * groups, groups, dim)] == list(expected.values())


@given(sizes)
def test_every_row_is_taken_once(size: tuple[int, int, int]) -> None:
    each, groups, dim = size
    taken = torch.cat(rows.qkv(each * groups, groups, dim))
    assert torch.equal(taken.sort().values, torch.arange((each + 2) * groups * dim))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_groups_that_do_not_divide_the_heads_are_refused(heads: int, groups: int, dim: int) -> None:
    if heads % groups:
        with pytest.raises(ValueError, match=f"{groups} query groups do not divide {heads} heads"):
            rows.qkv(heads, groups, dim)
    else:
        assert len(rows.qkv(heads, groups, dim)[0]) == heads * dim


def test_one_head_a_group_is_still_no_contiguous_split() -> None:
    q, k, v = rows.qkv(2, 2, 1)
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 3], [1, 4], [2, 5])


@given(st.integers(0, 100))
def test_gate_comes_before_up(count: int) -> None:
    if count % 2:
        with pytest.raises(ValueError, match="no two halves"):
            rows.halves(count)
    else:
        gate, up = rows.halves(count)
        assert gate.tolist() + up.tolist() == list(range(count))
        assert len(gate) == len(up)


@pytest.mark.upstream
def test_it_undoes_what_megatron_bridge_does() -> None:
    pytest.importorskip("megatron")
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "tests/lora/rows_case.py"], check=False, cwd=root, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert int(found.stdout.splitlines()[-1]) > 50
