"""Which elements of a parameter its weight loaders have written, whatever views they wrote through.

Imported only where vLLM's reload modules are, because it needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Offset, shape and strides of what was written, in elements of the parameter's storage.
Region: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]


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
class Loaded:
    """What has been written of one parameter in one session. A region that is written again counts once."""

    regions: set[Region] = field(default_factory=set)
    numel: int = 0

    def add(self, written: list[Region]) -> None:
        for region in written:
            if region not in self.regions:
                self.regions.add(region)
                self.numel += region[1].numel()


def unwritten(param: torch.Tensor, regions: set[Region]) -> torch.Tensor:
    """A mask of the elements of a parameter that are in no region: bool, of its shape, on its device."""
    storage = torch.ones(
        param.untyped_storage().nbytes() // param.element_size(), dtype=torch.bool, device=param.device
    )
    for offset, shape, strides in regions:
        storage.as_strided(shape, strides, offset).fill_(False)
    return storage.as_strided(param.shape, param.stride(), param.storage_offset())
