"""The variables of the environment that turn something on, and the spellings that do."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: A weight update that fails changes nothing.
ATOMIC_RELOAD = "ULTRA_PATCHES_ATOMIC_RELOAD"
#: The receiver of an export knows the names of unmerged adapters.
ALLOW_UNMERGED = "ULTRA_PATCHES_ALLOW_UNMERGED"

FLAGS = (ALLOW_UNMERGED, ATOMIC_RELOAD)
_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})


def meaning(text: str) -> bool | None:
    """What a text says in any case and with blanks around it; None where it says neither on nor off."""
    word = text.strip().lower()
    return True if word in _ON else False if word in _OFF else None


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a variable says on; one that says neither is off, and `ultra_patches.core.settings` complains of it."""
    return meaning((os.environ if environ is None else environ).get(name, "")) is True
