"""The trainer's and the worker's side of a transfer in which each rank's layout travels with its buffer.

Works on vLLM's IPC engines of every release: what differs between them is passed in as functions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ultra_patches.transfer.layout import (
    Layout,
    Part,
    Selected,
    agree,
    carries_layouts,
    check,
    check_parts,
    message,
    no_entry,
    select,
    upstream_handles,
)
from ultra_patches.untrusted import without_credentials

#: Sends one message: names, dtype_names, shapes, ipc_handles and, where packed, tensor_sizes.
Send = Callable[..., None]


def several_ranks() -> bool:
    """Whether upstream would gather handles: a process group of more than one rank exists."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def send_unpacked(
    items: Callable[[], Iterable[tuple[str, Any]]],
    gpu: str,
    sender: bool,
    reduce: Callable[[Any], Any],
    send: Send,
) -> list[Any]:
    """Every rank hands over all its tensors in one message; returns the tensors, which must outlive the transfer.

    `items` gives (name, tensor of any shape and dtype on this rank's GPU); `reduce` gives a tensor's IPC handle.
    """
    weights: list[Any] = []

    def share() -> tuple[Layout, list[Any]]:
        names, dtype_names, shapes, handles = [], [], [], []
        for name, tensor in items():
            names.append(name)
            dtype_names.append(str(tensor.dtype).rpartition(".")[2])
            shapes.append(list(tensor.shape))
            # The handle does not keep its memory alive, and the copy that contiguous() may make is the caller's to keep.
            weights.append(tensor.detach().contiguous())
            handles.append(reduce(weights[-1]))
        return Layout(names, dtype_names, shapes, None), handles

    _exchange(gpu, share, sender, send, packed=False)
    return weights


def send_packed(
    chunks: Callable[[], Iterator[Any]], gpu: str, sender: bool, send: Send, after: Callable[[], None]
) -> None:
    """Send chunk by chunk until every rank is done; a rank that has finished takes part with nothing.

    `chunks` gives vLLM's PackedIpcChunk one by one; `after` is upstream's barrier after each chunk.
    """

    def shares() -> Iterator[tuple[Layout, Any]]:
        left = chunks()
        while True:
            chunk = next(left, None)
            if chunk is None:
                yield Layout([], [], [], []), None
            else:
                layout = Layout(chunk.names, chunk.dtype_names, chunk.shapes, chunk.tensor_sizes)
                yield layout, chunk.ipc_handle[gpu]
            after()

    share = shares()
    while not _exchange(gpu, lambda: next(share), sender, send, packed=True):
        pass


def together(action: Callable[[], Any]) -> Any:
    """Do something that may fail on one rank, and fail on all of them where it did. Every rank must call this."""
    done, failure = None, None
    try:
        done = action()
    except BaseException as caught:  # noqa: BLE001 # raised again below, once the other ranks know
        failure = caught
    _tell(failure)
    return done


def _exchange(gpu: str, share: Callable[[], tuple[Layout, Any]], sender: bool, send: Send, *, packed: bool) -> bool:
    """Gather every rank's `share` and send one message; True where no rank has anything left.

    Where a rank fails to make its share or to send, that rank raises its own error and every other one a RuntimeError.
    """
    import torch
    import torch.distributed as dist

    layout = Layout([], [], [], None)
    failure: BaseException | None = None
    mine = Part(dist.get_rank(), gpu, "", None, packed=packed)
    try:
        layout, handles = share()
        if handles is not None:
            # What this rank has queued must be in its buffer before another process may be told of it.
            torch.accelerator.synchronize()
        # Pickled here, as what cannot be pickled or read back would fail inside a collective, on one rank alone.
        packet = None if handles is None else pickle.dumps(handles)
        mine = replace(mine, digest=layout.digest(), handles=packet)
    except BaseException as caught:  # noqa: BLE001 # raised again below, once the other ranks know
        failure = caught
        mine = replace(mine, error=_line(caught))
    parts: list[Part] = _gather(mine, failure)
    strange = [str(rank) for rank, part in enumerate(parts) if not isinstance(part, Part)]
    if strange:
        raise ValueError(
            f"rank {', '.join(strange)} sends weights without the overlay: `import ultra_patches` on every rank"
        )
    _raise_together([(part.rank, part.error) for part in parts], failure)
    check_parts(parts)
    if all(part.handles is None for part in parts):
        return True
    alike = agree(parts)
    first_of = {part.digest: part.rank for part in reversed(parts)}
    given = None if alike else _gather((mine.digest, layout.text()) if first_of[mine.digest] == mine.rank else None)

    def deliver() -> None:
        told = [replace(part, handles=part.handles and pickle.loads(part.handles)) for part in parts]  # noqa: S301 # of our own ranks
        if given is not None:
            known = {digest: Layout.of(text) for digest, text in filter(None, given)}
            send(**message(told, known, packed))
            return
        fields: dict[str, Any] = {"names": layout.names, "dtype_names": layout.dtype_names, "shapes": layout.shapes}
        fields["ipc_handles"] = upstream_handles(told, packed)
        if packed:
            fields["tensor_sizes"] = layout.sizes
        send(**fields)

    together(deliver if sender else lambda: None)
    return False


def _tell(failure: BaseException | None) -> None:
    import torch.distributed as dist

    text = None if failure is None else _line(failure)
    _raise_together(_gather((dist.get_rank(), text), failure), failure)


def _gather(value: Any, failure: BaseException | None = None) -> list[Any]:
    """The values of all ranks, in their order. Where another rank has gone, its error comes `from` this rank's failure."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(gathered, value)
    except Exception as lost:
        _note(lost, f"rank {dist.get_rank()} lost another rank in a weight transfer: see what ended that one")
        raise lost from failure
    return gathered


def _line(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {without_credentials(str(error))}"
    except Exception:  # noqa: BLE001 # the other ranks wait for an answer, whatever the error is like
        return type(error).__name__


def _raise_together(errors: list[tuple[int, str | None]], own: BaseException | None = None) -> None:
    told = [f"rank {rank}: {text}" for rank, text in errors if text]
    if not told:
        return
    said = f"weight transfer stopped on every rank: {'; '.join(told)}"
    if own is None:
        raise RuntimeError(said)
    _note(own, said)
    raise own


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


def receive(info: Any, gpu: str, load: Callable[[Any], None], arguments: Callable[[Any], tuple[Any, ...]]) -> None:
    """Check one message and load this worker's share of it with upstream's own `receive_weights`.

    `load` takes a message in upstream's form; `arguments` gives the rebuild arguments of a handle. Raises ValueError,
    before anything is loaded, for a message without an entry for this GPU or one that does not fit its buffer.
    """
    packed = getattr(info, "tensor_sizes", None) is not None
    if not packed and not isinstance(info.ipc_handles, list):
        load(info)  # a packed message without sizes: upstream has an error for it
        return
    selected = Selected(None, Layout([], [], [], None), None)
    try:
        selected = _selected(info, gpu, packed)
        if selected.handles is None:
            return  # the rank on this GPU has sent all it had, others have not
        _check(selected, gpu, arguments, packed)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{selected.where(gpu)}: the message is malformed ({_line(error)})") from error
    if not carries_layouts(info.names):
        load(info)
        return
    layout = selected.layout
    one = {gpu: selected.handles} if packed else [{gpu: handle} for handle in selected.handles]
    fields = {"names": list(layout.names), "dtype_names": list(layout.dtype_names), "shapes": list(layout.shapes)}
    if packed:
        fields["tensor_sizes"] = list(layout.sizes or ())
    load(replace(info, ipc_handles=one, **fields))


def _selected(info: Any, gpu: str, packed: bool) -> Selected:
    sizes = info.tensor_sizes if packed else None
    if carries_layouts(info.names):
        return select(info.names, info.dtype_names, info.shapes, sizes, info.ipc_handles, gpu)
    layout = Layout(info.names, info.dtype_names, info.shapes, sizes)
    by_gpu = [info.ipc_handles] if packed else info.ipc_handles
    lacking = next((index for index, handles in enumerate(by_gpu) if gpu not in handles), None)
    if lacking is not None:
        which = "" if packed else f"{info.names[lacking]}: "
        raise ValueError(which + no_entry(gpu, ", ".join(map(str, by_gpu[lacking]))))
    # Upstream merges the handles of all ranks in their order; one alone may be of any rank.
    gpus = list(by_gpu[0]) if by_gpu else []
    rank = gpus.index(gpu) if len(gpus) > 1 else None
    return Selected(rank, layout, info.ipc_handles[gpu] if packed else [handles[gpu] for handles in by_gpu])


def _check(selected: Selected, gpu: str, arguments: Callable[[Any], tuple[Any, ...]], packed: bool) -> None:
    import torch

    layout = selected.layout
    known = {name: getattr(torch, name, None) for name in set(layout.dtype_names)}
    dtypes = {name: dtype for name, dtype in known.items() if isinstance(dtype, torch.dtype)}
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    check(selected, gpu, itemsizes, _buffer_bytes(arguments(selected.handles)) if packed else None)
    if packed:
        return
    if len(selected.handles) != len(layout.names):
        raise ValueError(f"{selected.where(gpu)}: {len(layout.names)} names, {len(selected.handles)} handles")
    # A handle knows its tensor, so it tells when it stands under another parameter's name.
    for name, dtype_name, shape, handle in zip(
        layout.names, layout.dtype_names, layout.shapes, selected.handles, strict=True
    ):
        given = arguments(handle)
        if (tuple(given[1]), given[5]) != (tuple(shape), dtypes[dtype_name]):
            shared = f"{str(given[5]).removeprefix('torch.')} {list(given[1])}"
            raise ValueError(
                f"{selected.where(gpu)}: the tensor sent for {name} is {shared}, not {dtype_name} {list(shape)}: "
                "the trainer's ranks differ in what they yield, so it needs `import ultra_patches` too"
            )


def _buffer_bytes(arguments: tuple[Any, ...]) -> int:
    """Size of the shared buffer by the arguments of torch's `rebuild_cuda_tensor`: (class, size, stride, offset, …, dtype, …)."""
    import math

    return int(math.prod(arguments[1]) * arguments[5].itemsize)
