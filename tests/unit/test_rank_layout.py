"""A message for ranks that differ gives each GPU exactly the layout and the handles of its own rank."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.transfer.layout import (
    FORMAT,
    Layout,
    Part,
    agree,
    carries_layouts,
    check_parts,
    message,
    select,
    upstream_handles,
)

ITEMSIZE = {"bfloat16": 2, "float32": 4}


def layouts(packed: bool) -> st.SearchStrategy[Layout]:
    """Any order, shapes and count of parameters, none included."""
    item = st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(sorted(ITEMSIZE)),
        st.lists(st.integers(0, 4), max_size=3),
    )

    def made(items: list[tuple[str, str, list[int]]]) -> Layout:
        sizes = [ITEMSIZE[dtype] * _count(shape) for _, dtype, shape in items]
        names, dtypes, shapes = ([item[i] for item in items] for i in range(3))
        return Layout(names, dtypes, shapes, sizes if packed else None)

    return st.lists(item, max_size=4, unique_by=lambda i: i[0]).map(made)


def _count(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


@st.composite
def ranks(draw: st.DrawFn) -> tuple[list[Part], dict[str, Layout], bool]:
    """One part a rank, each on its own GPU; a rank that has nothing left hands over None."""
    packed = draw(st.booleans())
    chosen = draw(st.lists(layouts(packed), min_size=1, max_size=3))
    parts, known = [], {}
    for rank in range(draw(st.integers(1, 6))):
        finished = draw(st.booleans())
        layout = Layout([], [], [], [] if packed else None) if finished else draw(st.sampled_from(chosen))
        known[layout.digest()] = layout
        handles: Any = None if finished else f"buffer of {rank}" if packed else [(rank, n) for n in layout.names]
        parts.append(Part(rank, f"GPU-{rank}", layout.digest(), handles))
    return draw(st.permutations(parts)), known, packed


@given(ranks())
def test_each_gpu_gets_the_layout_and_the_handles_of_its_rank(
    given: tuple[list[Part], dict[str, Layout], bool],
) -> None:
    parts, known, packed = given
    fields = message(parts, known, packed)
    assert carries_layouts(fields["names"])
    for part in parts:
        found = select(
            fields["names"],
            fields["dtype_names"],
            fields["shapes"],
            fields.get("tensor_sizes"),
            fields["ipc_handles"],
            part.gpu,
        )
        assert (found.rank, found.handles) == (part.rank, part.handles)
        assert found.layout.digest() == part.digest


@given(ranks())
def test_equal_layouts_are_carried_once(given: tuple[list[Part], dict[str, Layout], bool]) -> None:
    parts, known, packed = given
    fields = message(parts, known, packed)
    distinct = len({part.digest for part in parts})
    assert {len(value) for value in fields.values()} == {distinct}
    assert ("tensor_sizes" in fields) == packed


@given(ranks())
def test_everything_but_the_handles_goes_through_json(given: tuple[list[Part], dict[str, Layout], bool]) -> None:
    fields = message(*given)
    del fields["ipc_handles"]
    assert json.loads(json.dumps(fields)) == fields


@given(ranks())
def test_a_gpu_that_no_rank_sends_for_is_an_error_that_lists_those_it_has(
    given: tuple[list[Part], dict[str, Layout], bool],
) -> None:
    parts, known, packed = given
    fields = message(parts, known, packed)
    with pytest.raises(ValueError, match="no trainer rank sends weights for GPU other") as error:
        select(fields["names"], fields["dtype_names"], fields["shapes"], None, fields["ipc_handles"], "other")
    for part in parts:
        assert f"rank {part.rank} on {part.gpu}" in str(error.value)


@given(layouts(True), layouts(True))
def test_digests_are_equal_exactly_where_the_layouts_are(one: Layout, two: Layout) -> None:
    assert (one.digest() == two.digest()) == (one == two)


def test_a_digest_does_not_depend_on_the_kind_of_sequence() -> None:
    one = Layout(["a"], ["float32"], [[2, 3]], [24])
    assert one.digest() == Layout(("a",), ("float32",), ((2, 3),), (24,)).digest()


def test_a_packed_layout_is_not_an_unpacked_one() -> None:
    assert Layout([], [], [], []).digest() != Layout([], [], [], None).digest()


def part(rank: int, digest: str = "d", handles: Any = "h", gpu: str | None = None) -> Part:
    return Part(rank, gpu or f"GPU-{rank}", digest, handles)


def test_ranks_agree() -> None:
    assert agree([part(0), part(1)])
    assert not agree([part(0), part(1, "other")])
    assert not agree([part(0), part(1, handles=None)])
    assert not agree([part(0, handles=None), part(1, handles=None)])


def test_handles_as_upstream_merges_them() -> None:
    assert upstream_handles([part(0, handles="a"), part(1, handles="b")], packed=True) == {"GPU-0": "a", "GPU-1": "b"}
    both = upstream_handles([part(0, handles=["a", "b"]), part(1, handles=["c", "d"])], packed=False)
    assert both == [{"GPU-0": "a", "GPU-1": "c"}, {"GPU-0": "b", "GPU-1": "d"}]


def test_two_layouts_from_one_gpu_are_an_error_that_names_both_ranks() -> None:
    with pytest.raises(ValueError, match="ranks 0 and 3 send different layouts from one GPU, GPU-0"):
        check_parts([part(0), part(1), part(3, "e", gpu="GPU-0")])


def test_one_rank_that_packs_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match="rank 0 sends single tensors, rank 2 packed chunks: give `packed` the same"):
        check_parts([part(0), part(1), Part(2, "GPU-2", "d", "h", packed=True)])


@given(layouts(True) | layouts(False))
def test_a_layout_comes_back_from_its_text(layout: Layout) -> None:
    assert Layout.of(layout.text()) == layout


@pytest.mark.parametrize("names", [[], ["a", "b"], ["format"]])
def test_upstreams_own_message_carries_no_layouts(names: list[str]) -> None:
    assert not carries_layouts(names)


@pytest.mark.parametrize("entry", [{"format": "ultra-patches.rank-layout/2", "ranks": {}, "names": []}, {}])
def test_a_format_that_is_not_ours_is_an_error(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"this worker reads {FORMAT}: install the same ultra-patches release"):
        select([entry], [[]], [[]], None, [{}], "GPU-0")
