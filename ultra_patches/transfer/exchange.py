"""The trainer's and the worker's side of a transfer in which each rank's layout travels with its buffer.

Works on vLLM's IPC engines of every release: what differs between them is passed in as functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ultra_patches.transfer.layout import (
    Layout,
    Part,
    Selected,
    agree,
    carries_layouts,
    check,
    message,
    select,
    upstream_handles,
)

#: Sends one message: names, dtype_names, shapes, ipc_handles and, where packed, tensor_sizes.
Send = Callable[..., None]


def several_ranks() -> bool:
    """Whether upstream would gather handles: a process group of more than one rank exists."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def send_unpacked(
    items: Iterable[tuple[str, Any]], gpu: str, sender: bool, reduce: Callable[[Any], Any], send: Send
) -> list[Any]:
    """Every rank hands over all its tensors in one message; returns the tensors, which must outlive the transfer.

    `items` are (name, tensor of any shape and dtype on this rank's GPU); `reduce` gives a tensor's IPC handle.
    """
    weights: list[Any] = []
    layout = Layout([], [], [], None)

    def share() -> tuple[Layout, list[Any]]:
        names, dtype_names, shapes, handles = [], [], [], []
        for name, tensor in items:
            names.append(name)
            dtype_names.append(str(tensor.dtype).rpartition(".")[2])
            shapes.append(list(tensor.shape))
            # The handle does not keep its memory alive, and the copy that contiguous() may make is the caller's to keep.
            weights.append(tensor.detach().contiguous())
            handles.append(reduce(weights[-1]))
        return Layout(names, dtype_names, shapes, None), handles

    error: str | None = None
    handles: list[Any] | None = None
    try:
        layout, handles = share()
    except Exception as caught:  # noqa: BLE001 # the other ranks wait in a collective and must be told
        error = f"{type(caught).__name__}: {caught}"
    _exchange(gpu, layout, handles, error, sender, send, packed=False)
    return weights


def send_packed(chunks: Iterator[Any], gpu: str, sender: bool, send: Send, after: Callable[[], None]) -> None:
    """Send chunk by chunk until every rank is done; a rank that has finished takes part with nothing.

    `chunks` yields vLLM's PackedIpcChunk; `after` is upstream's barrier after each chunk.
    """
    done = False
    while not done:
        error, chunk = None, None
        try:
            chunk = next(chunks, None)
        except Exception as caught:  # noqa: BLE001 # as above
            error = f"{type(caught).__name__}: {caught}"
        layout = Layout([], [], [], [])
        if chunk is not None:
            layout = Layout(chunk.names, chunk.dtype_names, chunk.shapes, chunk.tensor_sizes)
        handle = None if chunk is None else chunk.ipc_handle[gpu]
        done = _exchange(gpu, layout, handle, error, sender, send, packed=True)
        if not done:
            after()


def _exchange(
    gpu: str, layout: Layout, handles: Any, error: str | None, sender: bool, send: Send, *, packed: bool
) -> bool:
    """Gather every rank's part and send one message; True where no rank has anything left.

    Raises RuntimeError on every rank where one of them failed to make its part or to send.
    """
    import torch
    import torch.distributed as dist

    if handles is not None:
        # What this rank has queued must be in its buffer before another process may be told of it.
        torch.accelerator.synchronize()
    mine = Part(dist.get_rank(), gpu, layout.digest(), handles, error)
    parts: list[Part] = _gather(mine)
    _raise_together([(part.rank, part.error) for part in parts])
    if all(part.handles is None for part in parts):
        return True
    failure: Exception | None = None
    if agree(parts):
        fields: dict[str, Any] = {"names": layout.names, "dtype_names": layout.dtype_names, "shapes": layout.shapes}
        fields["ipc_handles"] = upstream_handles(parts, packed) if sender else None
        if packed:
            fields["tensor_sizes"] = layout.sizes
    else:
        first_of = {part.digest: part.rank for part in reversed(parts)}
        given = _gather((mine.digest, layout) if first_of[mine.digest] == mine.rank else None)
        fields = message(parts, dict(pair for pair in given if pair is not None), packed) if sender else {}
    if sender:
        try:
            send(**fields)
        except Exception as caught:  # noqa: BLE001 # raised again below, once the other ranks know
            failure = caught
    told = _gather((mine.rank, f"{type(failure).__name__}: {failure}" if failure else None))
    if failure is not None:
        raise failure
    _raise_together(told)
    return False


def _gather(value: Any) -> list[Any]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _raise_together(errors: list[tuple[int, str | None]]) -> None:
    told = [f"rank {rank}: {text}" for rank, text in errors if text]
    if told:
        raise RuntimeError(f"weight transfer stopped on every rank: {'; '.join(told)}")


def receive(info: Any, gpu: str, load: Callable[[Any], None], arguments: Callable[[Any], tuple[Any, ...]]) -> None:
    """Check one message and load this worker's share of it with upstream's own `receive_weights`.

    `load` takes a message in upstream's form; `arguments` gives the rebuild arguments of a handle. Raises ValueError,
    before anything is loaded, for a message without an entry for this GPU or one that does not fit its buffer.
    """
    import torch

    packed = getattr(info, "tensor_sizes", None) is not None
    if not packed and not isinstance(info.ipc_handles, list):
        load(info)  # a packed message without sizes: upstream has an error for it
        return
    sizes = info.tensor_sizes if packed else None
    if carries_layouts(info.names):
        selected = select(info.names, info.dtype_names, info.shapes, sizes, info.ipc_handles, gpu)
    elif packed:
        if gpu not in info.ipc_handles:
            raise ValueError(_no_entry(gpu, info.ipc_handles))
        selected = Selected(None, Layout(info.names, info.dtype_names, info.shapes, sizes), info.ipc_handles[gpu])
    else:
        missing = next((pair for pair in zip(info.names, info.ipc_handles, strict=False) if gpu not in pair[1]), None)
        if missing is not None:
            raise ValueError(f"{missing[0]}: {_no_entry(gpu, missing[1])}")
        handles = [handle[gpu] for handle in info.ipc_handles]
        selected = Selected(None, Layout(info.names, info.dtype_names, info.shapes, None), handles)
    if selected.handles is None:
        return  # the rank on this GPU has sent all it had, others have not
    layout = selected.layout
    known = {name: getattr(torch, name, None) for name in set(layout.dtype_names)}
    itemsizes = {name: dtype.itemsize for name, dtype in known.items() if isinstance(dtype, torch.dtype)}
    check(selected, gpu, itemsizes, _buffer_bytes(arguments(selected.handles)) if packed else None)
    if not packed:
        _check_shapes(selected, gpu, arguments)
    if not carries_layouts(info.names):
        load(info)
        return
    one = {gpu: selected.handles} if packed else [{gpu: handle} for handle in selected.handles]
    fields = {"names": list(layout.names), "dtype_names": list(layout.dtype_names), "shapes": list(layout.shapes)}
    if packed:
        fields["tensor_sizes"] = list(layout.sizes or ())
    load(dataclasses.replace(info, ipc_handles=one, **fields))


def _no_entry(gpu: str, handles: Any) -> str:
    return (
        f"no trainer rank sends weights for GPU {gpu} (the message has {', '.join(map(str, handles))}): "
        "trainer and rollout must run on the same GPUs"
    )


def _check_shapes(selected: Selected, gpu: str, arguments: Callable[[Any], tuple[Any, ...]]) -> None:
    """A handle knows the shape of its tensor, so it tells when it stands under another parameter's name."""
    layout = selected.layout
    if len(selected.handles) != len(layout.names):
        raise ValueError(f"GPU {gpu}: {len(layout.names)} names, {len(selected.handles)} handles")
    for name, shape, handle in zip(layout.names, layout.shapes, selected.handles, strict=True):
        shared = tuple(arguments(handle)[1])
        if shared != tuple(shape):
            rank = "?" if selected.rank is None else selected.rank
            raise ValueError(
                f"weights from rank {rank} on GPU {gpu}: the tensor sent for {name} has shape {list(shared)}, not {list(shape)}: "
                "the trainer's ranks differ in what they yield, so it needs `import ultra_patches` too"
            )


def _buffer_bytes(arguments: tuple[Any, ...]) -> int:
    """Size of the shared buffer by the arguments of torch's `rebuild_cuda_tensor`: (class, size, stride, offset, …, dtype, …)."""
    import math

    return int(math.prod(arguments[1]) * arguments[5].itemsize)
