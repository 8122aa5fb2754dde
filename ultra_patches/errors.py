"""The two things a user can get from the overlay besides a result, and one line on an error of somebody else."""

from __future__ import annotations


class UltraPatchesError(RuntimeError):
    """What was found, where, what it means and what to type next, in one line."""


class UltraPatchesWarning(UserWarning):
    """The same, where the program goes on."""


def one_line(error: BaseException) -> str:
    """The class of an error and the first line of its text, however its own methods behave."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 # the text of a foreign error is foreign code
        text = "its text cannot be read"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
