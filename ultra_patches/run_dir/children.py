"""The processes that this one has started: a child without the overlay writes no file, and is noticed by that.

vLLM starts its EngineCore and its workers through multiprocessing; torchrun gives each rank its number and the world's size.
Used only where ULTRA_PATCHES_RUN_DIR is set.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from ultra_patches.core import guard

RUN_DIR = "ULTRA_PATCHES_RUN_DIR"

_started: list[tuple[int, str]] = []
_original: Any = BaseProcess.start
_owner: list[int] = []


def watch(tell: Callable[[], object]) -> None:
    """Remember each child that multiprocessing starts from now on, and call `tell` then."""

    @functools.wraps(_original)
    def start(self: Any) -> None:
        _original(self)
        # The child runs: whatever goes wrong from here on is no failure to start it, in strict mode neither.
        with guard.door(f"noting a child process for {RUN_DIR}", strict=False):
            if self.pid is not None:
                _own().append((self.pid, self.name))
                tell()

    BaseProcess.start = start  # type: ignore[method-assign] # multiprocessing calls no hook here


def unwatch() -> None:
    """Leave multiprocessing as it was."""
    BaseProcess.start = _original  # type: ignore[method-assign] # as above


def started() -> list[dict[str, object]]:
    """The pid and the name of each child of this process, as plain data."""
    return [{"pid": pid, "name": name} for pid, name in _own()]


def _own() -> list[tuple[int, str]]:
    # A forked child starts with the list of its parent.
    if _owner != [os.getpid()]:
        _owner[:] = [os.getpid()]
        _started.clear()
    return _started


def launched() -> dict[str, object] | None:
    """Rank, world size and rendezvous that a launcher such as torchrun gave this process; None without one."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isascii() and rank.isdigit() and world.isascii() and world.isdigit()):
        return None
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return {"rank": int(rank), "world": int(world), "at": where}
