"""Which elements of a parameter its weight loaders have written, whatever views they wrote through.

Imported only where vLLM's reload modules are, because it needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Offset, shape and strides of what was written, in elements of the parameter's storage.
Region: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]


def _storage(tensor: torch.Tensor) -> int:
    # The address of the memory would not do: on the meta device it is 0 for all.
    return int(tensor.untyped_storage()._cdata)


class Writes(TorchDispatchMode):  # type: ignore[misc] # torch is not followed
    """Records each region of one parameter that is written inside, by copies alone or by fills as well."""

    def __init__(self, param: torch.Tensor, *, fills: bool = False) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self._storage = _storage(param)
        aten = torch.ops.aten
        self._operators = {aten.copy_.default}
        if fills:
            self._operators |= {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators and _storage(args[0]) == self._storage:
            self.regions.append((args[0].storage_offset(), tuple(args[0].shape), tuple(args[0].stride())))
        return func(*args, **(kwargs or {}))


@dataclass
class Loaded:
    """What has been written of one parameter in one session. A region that is written again counts once."""

    regions: set[Region] = field(default_factory=set)
    numel: int = 0

    def add(self, written: list[Region]) -> None:
        for region in written:
            if region not in self.regions:
                self.regions.add(region)
                self.numel += math.prod(region[1])


def unwritten(param: torch.Tensor, regions: set[Region]) -> torch.Tensor:
    """A mask of the elements of a parameter that are in no region: bool, of its shape, on its device."""
    storage = torch.ones(
        param.untyped_storage().nbytes() // param.element_size(), dtype=torch.bool, device=param.device
    )
    for offset, shape, strides in regions:
        storage.as_strided(shape, strides, offset).fill_(False)
    return storage.as_strided(param.shape, param.stride(), param.storage_offset())
