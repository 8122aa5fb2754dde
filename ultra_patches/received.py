"""Whether weights that are being received belong to nobody else, so that they can be kept without a copy.

A transport that allocates each tensor it hands over says so around its loading:

    with ultra_patches.received.own_copies():
        model.load_weights(weights)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_owned: ContextVar[bool] = ContextVar("ultra_patches_received_owned", default=False)


@contextlib.contextmanager
def own_copies(owned: bool = True) -> Iterator[None]:
    """Inside, no received tensor is written again by whoever received it."""
    token = _owned.set(owned)
    try:
        yield
    finally:
        _owned.reset(token)


def are_own_copies() -> bool:
    """What the transport that is loading in this thread has said; False where it said nothing."""
    return _owned.get()
