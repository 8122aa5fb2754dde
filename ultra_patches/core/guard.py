"""The guard at each door between the user's program and ours: what goes wrong behind it is said, and the program goes on.

The doors are what Python or the user's program calls without asking for a patch: arming, the import hooks, `status`, and what
keeps the file of a run.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

from ultra_patches.core import settings
from ultra_patches.errors import UltraPatchesError, UltraPatchesWarning, one_line
from ultra_patches.untrusted import without_credentials

_said: set[str] = set()


@contextlib.contextmanager
def door(doing: str, *, strict: bool = True) -> Iterator[None]:
    """Say what went wrong inside, once, and go on.

    Raises UltraPatchesError instead in strict mode, but for what corrects nothing: `strict` is False there. A
    KeyboardInterrupt passes, as it cannot be told from the user's.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, UltraPatchesError):
            text = str(error)
        else:
            text = f"{doing} failed ({one_line(error)}), and the program goes on without it: `ultra-patches status` says what is in force"
        text = without_credentials(text)
        if strict and settings.is_strict():
            raise UltraPatchesError(text) from error
        say(text, 4)


def say(text: str, level: int = 3) -> None:
    """Warn once a process. Never raises: a warning may be an error here, a user's `showwarning` may raise, stderr be closed."""
    if text in _said:
        return
    _said.add(text)
    try:
        warnings.warn(text, UltraPatchesWarning, stacklevel=level)
    except KeyboardInterrupt:
        raise
    except BaseException:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"ultra-patches: {text}\n")


def forget() -> None:
    """Say everything once more."""
    _said.clear()
