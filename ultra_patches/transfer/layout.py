"""How one rank laid out the weights it sends over CUDA IPC, and the message that carries the layouts of several ranks.

Pure data: nothing here touches a tensor. vLLM's message (`IPCWeightTransferUpdateInfo`, `vllm/distributed/weight_transfer/
ipc_engine.py`) holds one list of names for all ranks. It is sent unchanged while all ranks agree. Where they differ each of
its fields becomes a list with one entry per distinct layout:

    names         [{"format": FORMAT, "ranks": {gpu uuid: rank}, "names": [str, ...]}, ...]
    dtype_names   [[str, ...], ...]          shapes  [[[int, ...], ...], ...]
    tensor_sizes  [[bytes, ...], ...]        ipc_handles  [{gpu uuid: [handles]}, ...]

A worker without the overlay fails on that form before it loads anything: packed it adds a list to a number, unpacked it
finds no handle, or a handle of one element where it writes the seventh.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMAT = "ultra-patches.rank-layout/1"


@dataclass(frozen=True)
class Layout:
    """What one rank sends in one message, in order. `sizes` are bytes in the packed buffer, None where not packed."""

    names: Sequence[str]
    dtype_names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    sizes: Sequence[int] | None

    def text(self) -> str:
        """All of it as JSON. Raises TypeError where a name, a dtype, a shape or a size is nothing that JSON has."""
        data = [
            list(self.names),
            list(self.dtype_names),
            [list(s) for s in self.shapes],
            self.sizes and list(self.sizes),
        ]
        return json.dumps(data)

    @staticmethod
    def of(text: str) -> Layout:
        """The layout of which `text` was made."""
        return Layout(*json.loads(text))

    def digest(self) -> str:
        """Equal exactly where the layouts are."""
        return hashlib.sha256(self.text().encode()).hexdigest()


@dataclass(frozen=True)
class Part:
    """One rank's share of one message; `handles` is a list of rebuild arguments, or one where packed, or None at the end."""

    rank: int
    gpu: str
    digest: str
    handles: Any
    error: str | None = None
    packed: bool = False


def check_parts(parts: Sequence[Part]) -> None:
    """Raise ValueError, naming the ranks, where no message can say what they send. Equal on every rank that has these parts."""
    rank_of: dict[str, Part] = {}
    for part in parts:
        if part.packed != parts[0].packed:
            kinds = {True: "packed chunks", False: "single tensors"}
            raise ValueError(
                f"rank {parts[0].rank} sends {kinds[parts[0].packed]}, rank {part.rank} {kinds[part.packed]}: "
                "give `packed` the same value on every rank"
            )
        other = rank_of.setdefault(part.gpu, part)
        if other.digest != part.digest:
            raise ValueError(
                f"ranks {other.rank} and {part.rank} send different layouts from one GPU, {part.gpu}: "
                "give each rank a GPU of its own, or let them yield the same"
            )


def agree(parts: Sequence[Part]) -> bool:
    """Whether upstream's message says all there is to say: every rank sends the same layout."""
    return len({part.digest for part in parts}) == 1 and all(part.handles is not None for part in parts)


def upstream_handles(parts: Sequence[Part], packed: bool) -> Any:
    """Handles keyed by GPU as upstream merges them: one dict where packed, one a parameter where not."""
    if packed:
        return {part.gpu: part.handles for part in parts}
    return [{part.gpu: part.handles[index] for part in parts} for index in range(len(parts[0].handles))]


def message(parts: Sequence[Part], layouts: Mapping[str, Layout], packed: bool) -> dict[str, Any]:
    """The fields of a message for ranks that differ. `layouts` maps a digest to its layout; `check_parts` has passed."""
    order = list(dict.fromkeys(part.digest for part in parts))
    shared = [[part for part in parts if part.digest == digest] for digest in order]
    chosen = [layouts[digest] for digest in order]
    fields: dict[str, Any] = {
        "names": [
            {"format": FORMAT, "ranks": {part.gpu: part.rank for part in group}, "names": list(layout.names)}
            for layout, group in zip(chosen, shared, strict=True)
        ],
        "dtype_names": [list(layout.dtype_names) for layout in chosen],
        "shapes": [[list(shape) for shape in layout.shapes] for layout in chosen],
        "ipc_handles": [{part.gpu: [part.handles] for part in group} for group in shared],
    }
    if packed:
        fields["tensor_sizes"] = [list(layout.sizes or ()) for layout in chosen]
    return fields


@dataclass(frozen=True)
class Selected:
    """What one worker takes out of a message: the layout of the rank on its GPU, and that rank's handles."""

    rank: int | None
    layout: Layout
    handles: Any

    def where(self, gpu: str) -> str:
        """How every error begins."""
        return f"weights from rank {'?' if self.rank is None else self.rank} on GPU {gpu}"


def no_entry(gpu: str, listed: str) -> str:
    """What is wrong with a message that has nothing for a GPU."""
    return f"no trainer rank sends weights for GPU {gpu} (the message has {listed}): trainer and rollout must run on the same GPUs"


def carries_layouts(names: Sequence[Any]) -> bool:
    """Whether a message's `names` field is of the form above."""
    return bool(names) and isinstance(names[0], Mapping)


def select(names: Sequence[Any], dtype_names: Any, shapes: Any, sizes: Any, handles: Any, gpu: str) -> Selected:
    """Take the entry of one GPU. Raises ValueError where there is none, and for a format this release cannot read."""
    seen: dict[str, int] = {}
    for index, entry in enumerate(names):
        if entry.get("format") != FORMAT:
            raise ValueError(
                f"weights from rank ? on GPU {gpu}: the message has format {entry.get('format')!r}, this worker reads {FORMAT}: "
                "install the same ultra-patches release for trainer and rollout"
            )
        seen |= entry["ranks"]
        if gpu in entry["ranks"]:
            size = sizes[index] if sizes is not None else None
            layout = Layout(entry["names"], dtype_names[index], shapes[index], size)
            return Selected(entry["ranks"][gpu], layout, handles[index][gpu][0])
    raise ValueError(no_entry(gpu, ", ".join(f"rank {rank} on {uuid}" for uuid, rank in seen.items())))


def check(selected: Selected, gpu: str, itemsizes: Mapping[str, int], buffer_bytes: int | None) -> None:
    """Raise ValueError, naming rank, GPU and parameter, unless the layout fits itself and its buffer.

    `itemsizes` gives bytes an element for each dtype name; `buffer_bytes` is the size of the packed buffer, None where
    each parameter has its own.
    """
    layout = selected.layout
    where = selected.where(gpu)
    counts = [len(layout.names), len(layout.dtype_names), len(layout.shapes)]
    counts += [] if layout.sizes is None else [len(layout.sizes)]
    if len(set(counts)) != 1:
        raise ValueError(f"{where}: names, dtypes, shapes and sizes have different lengths: {counts}")
    offset = 0
    seen: set[str] = set()
    for index, name in enumerate(layout.names):
        if not isinstance(name, str):
            raise ValueError(f"{where}: parameter {index} is called {name!r}, which is no name")  # noqa: TRY004 # as all here
        if name in seen:
            raise ValueError(f"{where}: {name} is sent twice in one message")
        seen.add(name)
        itemsize = itemsizes.get(layout.dtype_names[index])
        if itemsize is None:
            raise ValueError(f"{where}: {name} has dtype {layout.dtype_names[index]!r}, which torch does not know")
        if any(not isinstance(length, int) or length < 0 for length in layout.shapes[index]):
            raise ValueError(f"{where}: {name} has shape {layout.shapes[index]!r}, which no tensor has")
        if layout.sizes is None or buffer_bytes is None:
            continue
        size, wanted = layout.sizes[index], math.prod(layout.shapes[index]) * itemsize
        if size != wanted:
            shape = list(layout.shapes[index])
            raise ValueError(
                f"{where}: {name} has {size} bytes in the buffer, but {layout.dtype_names[index]} {shape} takes {wanted}"
            )
        offset += size
        if offset > buffer_bytes:
            raise ValueError(f"{where}: {name} ends at byte {offset} of a buffer of {buffer_bytes}")
