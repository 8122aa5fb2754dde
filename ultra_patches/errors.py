"""The two things a user can get from the overlay besides a result."""

from __future__ import annotations


class UltraPatchesError(RuntimeError):
    """What was found, where, what it means and what to type next, in one line."""


class UltraPatchesWarning(UserWarning):
    """The same, where the program goes on."""
