"""What `doctor` says, one finding at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Diagnosis:
    """What was found and where, what it means, and what to type next. A `problem` keeps a patch from a process."""

    check: str
    severity: Literal["problem", "note"]
    what: str
    where: str
    means: str
    do: str
