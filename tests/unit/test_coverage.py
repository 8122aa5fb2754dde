"""What was written of a parameter, counted exactly, whatever the views and however they overlap."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.reload.regions import Coverage, Writes, unwritten


@st.composite
def parameters(draw: Any) -> torch.Tensor:
    shape = draw(st.sampled_from([(8,), (4, 6), (3, 4, 5), (4, 1, 6)]))
    if draw(st.booleans()):
        return torch.zeros(shape)
    return torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))


@st.composite
def views(draw: Any, of: torch.Tensor) -> torch.Tensor:
    """A view as loaders take them: shards, experts, steps, transposes, flat."""
    view = of
    for kind in draw(st.lists(st.sampled_from(["narrow", "select", "flat", "step", "transpose"]), max_size=3)):
        if not view.dim():
            break
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        if kind == "narrow":
            first = draw(st.integers(0, size))
            view = view.narrow(dim, first, draw(st.integers(0, size - first)))
        elif kind == "select" and size:
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "flat" and view.is_contiguous():
            view = view.view(-1)
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "transpose":
            view = view.transpose(0, dim)
    return view


@given(st.data())
def test_each_element_counts_once(data: st.DataObject) -> None:
    param = data.draw(parameters())
    covered, writes = Coverage(param), Writes()
    for view in data.draw(st.lists(views(param), max_size=7)):
        with writes.of(param):
            view.copy_(torch.ones(view.shape))
        covered.add(writes.regions)
        assert covered.numel == int(param.sum())


@given(st.data())
def test_what_is_not_written_is_told_by_element(data: st.DataObject) -> None:
    param = data.draw(parameters())
    writes = Writes(fills=True)
    with writes.of(param):
        for view in data.draw(st.lists(views(param), max_size=4)):
            view.fill_(1.0)
        torch.zeros(3).fill_(1.0)  # another tensor's memory
    assert torch.equal(unwritten(param, writes.regions), param == 0)


def test_shards_of_many_experts_take_no_longer_than_they_are_many() -> None:
    """Each region is compared with its neighbours alone: a quadratic count would take hours here."""
    experts = torch.empty(4096, 8, 16, device="meta")
    covered = Coverage(experts)
    for shard in (0, 1):
        for expert in range(4096):
            view = experts[expert].narrow(1, 8 * shard, 8)
            covered.add([(view.storage_offset(), view.shape, view.stride())])
    assert covered.numel == experts.numel()
