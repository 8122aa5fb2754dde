"""What ends a run with one line instead of a traceback."""


class RunError(Exception):
    """Says what was found, where, and what to do next."""
