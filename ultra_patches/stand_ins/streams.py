"""CUDA streams without a GPU: what is queued on a stream happens when something waits for it, and not before.

For probes alone. A stream is a list of calls; a synchronisation, an event or another stream that waits runs them. That is the
latest a GPU may be, so what is right here is ordered by the code and not by luck.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class Stream:
    """A queue in place of `torch.cuda.Stream`. The current stream is the last of `Stream.entered`."""

    entered: list[Stream] = []  # noqa: RUF012 # one for the process, as the driver has

    def __init__(self, *_: Any, **__: Any) -> None:
        self.queue: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        if other is not self:
            other.synchronize()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A place in a stream's queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._before: list[Callable[[], None]] = []
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or Stream.entered[-1]
        self._before = list(self._stream.queue)

    def wait(self, *_: Any) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        while self._stream and self._stream.queue and self._stream.queue[0] in self._before:
            self._stream.queue.pop(0)()


#: What runs on the current stream, after what that holds; a view is no kernel.
_KERNELS = (torch.Tensor.clone, torch.Tensor.copy_, torch.Tensor.item, torch.Tensor.tolist)


class _OnCpu(TorchFunctionMode):  # type: ignore[misc] # torch is not followed
    """Allocates on the CPU what asks for a GPU, and runs each kernel in the order of its stream."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func in _KERNELS:
            Stream.entered[-1].synchronize()
        return func(*args, **kwargs)


@contextlib.contextmanager
def _enter(stream: Stream) -> Iterator[None]:
    Stream.entered.append(stream)
    try:
        yield
    finally:
        Stream.entered.pop()


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Inside, torch's streams and events are these, and its GPU is the CPU."""
    current = lambda *_, **__: Stream.entered[-1]  # noqa: E731 # three names for one line
    with (
        contextlib.ExitStack() as stack,
        _OnCpu(),
        _enter(Stream()),
    ):
        for owner, name, value in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "Event", Event),
            (torch.cuda, "stream", _enter),
            (torch.cuda, "current_stream", current),
            (torch, "Event", Event),
            (torch.Tensor, "record_stream", lambda *_: None),
            (torch.accelerator, "current_stream", current),
            (torch.accelerator, "current_device_index", lambda: 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


class Group:
    """A communicator whose broadcast arrives when the stream it was issued on gets there."""

    def __init__(self, packs: list[torch.Tensor]) -> None:
        self._packs = list(packs)

    def broadcast(self, tensor: torch.Tensor, **_: Any) -> None:
        pack = self._packs.pop(0)
        Stream.entered[-1].queue.append(lambda: tensor.copy_(pack))
