"""A fixed state of torch around a probe that has to run in somebody's process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """Defaults as in a fresh process: fp32 on CPU, gradients, no deterministic mode; what was there comes back afterwards.

    Nothing where torch is not loaded. The default dtype and the deterministic mode are seen by every thread.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        with (
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
