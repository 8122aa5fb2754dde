"""What ends a run with one line instead of a traceback."""

import sys
from collections.abc import Callable


class RunError(Exception):
    """Says what was found, where, and what to do next."""


def reported(work: Callable[[], None]) -> int:
    """The exit status of a command: 0, or 1 with the error's line on stderr."""
    try:
        work()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
