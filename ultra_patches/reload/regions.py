"""Which elements of a parameter its weight loaders have written, whatever views they wrote through.

Imported only where vLLM's reload modules are, because it needs torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Offset, shape and strides of what was written, in elements of the parameter's storage.
Region: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"

#: First and last index (exclusive) in each dimension of the parameter.
_Box: TypeAlias = "tuple[tuple[int, int], ...]"


class Writes(TorchDispatchMode):  # type: ignore[misc] # torch is not followed
    """Records each region of one parameter that is written inside, by copies alone or by fills as well.

    One can be used again for another parameter: it is made once, because that takes as long as a small load.
    """

    def __init__(self, *, fills: bool = False) -> None:
        super().__init__()
        aten = torch.ops.aten
        self.regions: list[Region] = []
        self._storage = 0
        self._operators = {aten.copy_.default}
        if fills:
            self._operators |= {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}

    def of(self, param: torch.Tensor) -> Writes:
        """The same, for another parameter and with nothing recorded."""
        self.regions = []
        # The address of the memory would not do: on the meta device it is 0 for all.
        self._storage = param.untyped_storage()._cdata
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            written = args[0]
            if written.untyped_storage()._cdata == self._storage:
                self.regions.append((written.storage_offset(), written.shape, written.stride()))
        return func(*args, **kwargs) if kwargs else func(*args)


@dataclass
class _Span:
    """Regions that lie within one stretch of memory, and how many elements are in any of them."""

    start: int
    end: int
    regions: list[Region]
    numel: int

    @property
    def is_solid(self) -> bool:
        return self.numel == self.end - self.start


class Coverage:
    """How many elements of one parameter were written in a session. What is written again counts once.

    Almost every loader writes stretches of memory that are equal or apart, so these are compared as intervals. Slices of an
    inner dimension interleave in memory and are compared as boxes. Elements are looked at one by one only where that does
    not tell: parts that overlap and are not solid.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.numel = 0
        self._offset, self._shape, self._strides = param.storage_offset(), tuple(param.shape), param.stride()
        self._seen: set[Region] = set()
        self._starts: list[int] = []
        self._spans: list[_Span] = []

    def add(self, written: Iterable[Region]) -> None:
        """Count what these regions add."""
        for region in written:
            if region not in self._seen:
                self._seen.add(region)
                self._add(region)

    def _add(self, region: Region) -> None:
        offset, shape, strides = region
        count = math.prod(shape)
        if count == 0:
            return
        end = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        first = bisect_right(self._starts, offset)
        if first and self._spans[first - 1].end > offset:
            first -= 1
        last = bisect_left(self._starts, end, lo=first)
        touched = self._spans[first:last]
        span = (
            self._joined(touched, _Span(offset, end, [region], count))
            if touched
            else _Span(offset, end, [region], count)
        )
        self._starts[first:last], self._spans[first:last] = [span.start], [span]
        self.numel += span.numel - sum(other.numel for other in touched)

    def _joined(self, touched: Sequence[_Span], new: _Span) -> _Span:
        start, end = min(touched[0].start, new.start), max(touched[-1].end, new.end)
        if new.is_solid and all(span.is_solid for span in touched):
            return _Span(start, end, [(start, (end - start,), (1,))], end - start)
        regions = [region for span in touched for region in span.regions]
        if self._is_apart(new.regions[0], regions):
            return _Span(start, end, [*regions, *new.regions], new.numel + sum(span.numel for span in touched))
        mask = torch.zeros(end - start, dtype=torch.bool, device="cpu")
        for offset, shape, strides in (*regions, *new.regions):
            mask.as_strided(shape, strides, offset - start).fill_(True)
        return _Span(start, end, [*regions, *new.regions], int(mask.sum()))

    def _is_apart(self, region: Region, others: Iterable[Region]) -> bool:
        """Whether a region has no element in common with others, as far as their boxes tell."""
        box = self._box(region)
        if box is None:
            return False
        boxes = map(self._box, others)
        return all(
            other is not None and any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(box, other, strict=True))
            for other in boxes
        )

    def _box(self, region: Region) -> _Box | None:
        """The indices of a region in each dimension of the parameter; None where it is no slice of it."""
        offset, shape, strides = region
        sizes = {stride: size for size, stride in zip(shape, strides, strict=True) if size != 1}
        if len(sizes) != sum(size != 1 for size in shape):
            return None
        rest, box = offset - self._offset, []
        for size, stride in zip(self._shape, self._strides, strict=True):
            if size == 1:
                box.append((0, 1))
                continue
            first, rest = divmod(rest, stride)
            box.append((first, first + sizes.pop(stride, 1)))
            if box[-1][1] > size:
                return None
        return tuple(box) if not rest and not sizes else None


def unwritten(param: torch.Tensor, regions: Iterable[Region]) -> torch.Tensor:
    """A mask of the elements of a parameter that are in no region: bool, of its shape, on its device."""
    storage = torch.ones(
        param.untyped_storage().nbytes() // param.element_size(), dtype=torch.bool, device=param.device
    )
    for offset, shape, strides in regions:
        storage.as_strided(shape, strides, offset).fill_(False)
    return storage.as_strided(param.shape, param.stride(), param.storage_offset())
