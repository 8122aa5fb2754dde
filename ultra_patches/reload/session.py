"""What patches of the layerwise reload put in the place of a layer's tensors until its session ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_UNDO = "ultra_undo"


def is_waiting(info: Any) -> bool:
    """Whether a layer waits for weights of a reload. A model that is loaded for the first time has no kernel tensors."""
    waits = info.can_load if hasattr(info, "can_load") else info.can_process  # can_process until 0.18
    return info.kernel_tensors is not None and bool(waits())


def at_end(info: Any, undo: Callable[[], None]) -> None:
    """Remember what is to be undone for a layer when its session is finished or abandoned. `info` is upstream's of it."""
    vars(info).setdefault(_UNDO, []).append(undo)


def end(info: Any) -> None:
    """Undo, newest first, what was put in place for the session."""
    for undo in reversed(vars(info).pop(_UNDO, [])):
        undo()
