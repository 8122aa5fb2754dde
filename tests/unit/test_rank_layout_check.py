"""A layout that does not fit itself or its buffer is an error that names rank, GPU and parameter."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.transfer.layout import Layout, Selected, check

ITEMSIZE = {"torch.uint8": 1, "bfloat16": 2, "float32": 4}
WHERE = re.escape("weights from rank 3 on GPU GPU-a: ")
GOOD = Layout(["w", "b"], ["float32", "bfloat16"], [[2, 3], [5]], [24, 10])


def verify(layout: Layout, buffer: int | None = 34, rank: int | None = 3) -> None:
    check(Selected(rank, layout, None), "GPU-a", ITEMSIZE, buffer)


def changed(**fields: Sequence[Any]) -> Layout:
    return dataclasses.replace(GOOD, **fields)


@pytest.mark.parametrize("buffer", [34, 35, 1 << 30])
def test_what_fits_passes(buffer: int) -> None:
    verify(GOOD, buffer)


def test_parameters_of_their_own_need_no_buffer() -> None:
    verify(changed(sizes=None), None)


def test_nothing_passes() -> None:
    verify(Layout([], [], [], []), 0)


@pytest.mark.parametrize(
    ("layout", "buffer", "message"),
    [
        (changed(names=["w"]), 34, r"names, dtypes, shapes and sizes have different lengths: \[1, 2, 2, 2\]"),
        (changed(dtype_names=["float32"]), 34, r"different lengths: \[2, 1, 2, 2\]"),
        (changed(shapes=[[2, 3]]), 34, r"different lengths: \[2, 2, 1, 2\]"),
        (changed(sizes=[24]), 34, r"different lengths: \[2, 2, 2, 1\]"),
        (changed(names=["w", "w"]), 34, "w is sent twice in one message"),
        (changed(names=["w", 7]), 34, "parameter 1 is called 7, which is no name"),
        (changed(shapes=[[2, 3], [-5]]), 34, r"b has shape \[-5\], which no tensor has"),
        (changed(shapes=[[2, 3], [5.0]]), 34, r"b has shape \[5.0\], which no tensor has"),
        (changed(dtype_names=["float32", "float4"]), 34, "b has dtype 'float4', which torch does not know"),
        (changed(sizes=[24, 12]), 36, r"b has 12 bytes in the buffer, but bfloat16 \[5\] takes 10"),
        (changed(sizes=[0, 10]), 34, r"w has 0 bytes in the buffer, but float32 \[2, 3\] takes 24"),
        (changed(shapes=[[2, 3], [4]]), 34, r"b has 10 bytes in the buffer, but bfloat16 \[4\] takes 8"),
        (GOOD, 33, "b ends at byte 34 of a buffer of 33"),
        (GOOD, 0, "w ends at byte 24 of a buffer of 0"),
    ],
)
def test_what_does_not_fit_names_rank_gpu_and_parameter(layout: Layout, buffer: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{WHERE}.*{message}"):
        verify(layout, buffer)


def test_a_rank_that_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"^weights from rank \? on GPU GPU-a: w is sent twice"):
        verify(changed(names=["w", "w"]), rank=None)


@pytest.mark.parametrize("fields", [{"names": ["w", "w"]}, {"dtype_names": ["float32", "float4"]}, {"shapes": [[1]]}])
def test_parameters_of_their_own_are_checked_too(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=WHERE):
        verify(changed(sizes=None, **fields), None)


def test_an_empty_parameter_may_start_anywhere() -> None:
    verify(Layout(["s", "e", "t"], ["torch.uint8", "float32", "torch.uint8"], [[1], [0], [1]], [1, 0, 1]), 2)


ITEMS = st.lists(
    st.tuples(st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=5
)


def made(items: list[tuple[str, list[int]]]) -> Layout:
    items = sorted(items, key=lambda item: -ITEMSIZE[item[0]])
    sizes = [math.prod(shape) * ITEMSIZE[dtype] for dtype, shape in items]
    return Layout([f"p{i}" for i in range(len(items))], [d for d, _ in items], [s for _, s in items], sizes)


@given(ITEMS)
def test_wider_dtypes_first_always_fit_exactly(items: list[tuple[str, list[int]]]) -> None:
    layout = made(items)
    assert layout.sizes is not None
    total = sum(layout.sizes)
    verify(layout, total)
    if total:
        with pytest.raises(ValueError, match=f"of a buffer of {total - 1}"):
            verify(layout, total - 1)


@given(ITEMS, st.data())
def test_any_size_that_is_changed_is_seen(items: list[tuple[str, list[int]]], data: st.DataObject) -> None:
    layout = made(items)
    sizes = list(layout.sizes or ())
    index = data.draw(st.integers(0, len(sizes) - 1))
    sizes[index] += data.draw(st.sampled_from([-4, -1, 1, 4]))
    with pytest.raises(ValueError, match=f"p{index} has {sizes[index]} bytes"):
        verify(dataclasses.replace(layout, sizes=sizes), 1 << 20)
