"""End a layerwise reload that nobody will finish: the layers that are not through get their old tensors back.

Imported only where vLLM's reload modules are. `module` is vLLM's reload.layerwise throughout.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

from ultra_patches.errors import UltraPatchesWarning
from ultra_patches.reload import session as reload_session

#: Set to 1, no layer takes its new weights before the session ends, at the price of holding all of them until then.
ATOMIC = "ULTRA_PATCHES_ATOMIC_RELOAD"

#: The layers that have taken their new weights in this session.
_taken: WeakSet[Any] = WeakSet()
#: Not empty while a session ends.
_taking: list[ModuleType] = []


def abandon(module: ModuleType, layers: Iterable[Any] | None = None) -> int:
    """Put the old tensors back in every layer that waits, or in those given. Gives the number of those with weights."""
    count = 0
    for layer in list(module.LAYERWISE_INFO if layers is None else layers):
        info = module.get_layerwise_info(layer)
        reload_session.end(info)
        if not reload_session.is_waiting(info):
            continue
        count += info.load_numel_total > 0
        module._place_kernel_tensors(layer, info)
        info.reset()
    # Since 0.21; only decides about a warning.
    getattr(module, "LOADING_LAYERS", set()).clear()
    return count


@contextlib.contextmanager
def abandon_on_failure(module: ModuleType, what: str) -> Iterator[None]:
    """Inside, an exception ends the session before it goes on, and a warning says what the model computes with."""
    try:
        yield
    except BaseException as error:
        new = len(_taken)
        old = abandon(module)
        if old:
            mixed = f"; {new} others have taken their new weights before, so that the model is mixed" if new else ""
            warnings.warn(
                f"{what} failed ({type(error).__name__}): {old} layers have their old weights back{mixed}. Send all weights "
                f"in a new session before generating again, or set {ATOMIC}=1 so that a failed session changes nothing",
                UltraPatchesWarning,
                stacklevel=3,
            )
        raise


def process(original: Callable[[Any, Any], None], layer: Any, info: Any) -> None:
    """Let a layer take its weights, unless it is to wait for the end of the session; remember that it has."""
    waits = reload_session.is_waiting(info)
    if waits and os.environ.get(ATOMIC) == "1" and not _taking:
        return
    original(layer, info)
    if waits:
        _taken.add(layer)


def forget_session(module: ModuleType, model: Any) -> None:
    """What a new session does first: ends one on the same model that was never finished."""
    _taken.clear()
    if abandon(module, model.modules()) and hasattr(model, "_original_do_torchao_reload"):
        # Upstream would take the value that it had set itself for the user's.
        model._do_torchao_reload = model._original_do_torchao_reload


@contextlib.contextmanager
def taking(module: ModuleType, model: Any) -> Iterator[None]:
    """The end of a session: the layers that `process` has kept waiting are processed, and inside none waits any more.

    Attention waits for upstream's own end of the session.
    """
    attention = getattr(module, "is_deferred_attention_layer", None) or (
        lambda layer: isinstance(layer, (module.Attention, module.MLAAttention))
    )
    _taking.append(module)
    try:
        for layer in model.modules():
            info = module.get_layerwise_info(layer)
            is_complete = reload_session.is_waiting(info) and 0 < info.load_numel_total <= info.load_numel
            if is_complete and not attention(layer):
                module._layerwise_process(layer, info)
        yield
    finally:
        _taking.clear()
