"""What one process has written about itself under `ULTRA_PATCHES_RUN_DIR`, as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ultra_patches import untrusted
from ultra_patches.errors import UltraPatchesError

FORMAT = 1
#: The kind of a patch that is `applied` or `applied-late`.
IN_FORCE = "in force"


@dataclass(frozen=True)
class Process:
    """What one process wrote: `patches` has (upstream, state, reason) by id, `imported` the versions of the loaded upstreams."""

    file: str
    host: str
    pid: int
    ppid: int
    rank: int | None
    role: str
    python: str
    overlay: str
    time: str
    imported: Mapping[str, str | None]
    installed: Mapping[str, str | None]
    patches: Mapping[str, tuple[str, str, str]]
    #: The pid and the name of each process that it started through multiprocessing.
    children: tuple[tuple[int, str], ...] = ()
    #: Rank, world size and rendezvous that its launcher gave it.
    launched: tuple[int, int, str] | None = None

    @property
    def name(self) -> str:
        return f"{self.host} pid {self.pid} rank {'-' if self.rank is None else self.rank} ({self.role})"

    def kind(self, patch_id: str) -> str:
        """The state as processes are compared by it: `applied` and `applied-late` are one, `armed` agrees with any."""
        state = self.patches[patch_id][1] if patch_id in self.patches else "not declared"
        return IN_FORCE if state in ("applied", "applied-late") else state

    def digest(self, upstream: str, usual: Mapping[str, str]) -> str:
        """16 hex digits, equal where release, overlay and patches are. An armed patch counts as `usual` says, else as in force."""
        ids = sorted(name for name, (of, _, _) in self.patches.items() if of == upstream)
        kinds = [(name, usual.get(name, IN_FORCE) if self.kind(name) == "armed" else self.kind(name)) for name in ids]
        text = json.dumps([upstream, self.imported.get(upstream), self.overlay, kinds])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def process_of(name: str, data: Mapping[str, Any]) -> Process:
    """What a file of this name holds. Raises TypeError, KeyError or AttributeError where that is no process."""
    installed = {key: _optional(_text, value["version"]) for key, value in data["upstreams"].items()}
    imported = {key: version for key, version in installed.items() if data["upstreams"][key]["imported"]}
    patches = {
        key: (_text(value["upstream"]), _text(value["state"]), _text(value["reason"]))
        for key, value in data["patches"].items()
    }
    given = data.get("launched")
    return Process(
        file=name,
        host=_text(data["host"]),
        pid=_whole(data["pid"]),
        ppid=_whole(data["ppid"]),
        rank=_optional(_whole, data["rank"]),
        role=_text(data["role"]),
        python=_text(data["python"]),
        overlay=_text(data["overlay"]),
        time=_text(data["time"]),
        imported=imported,
        installed=installed,
        patches=patches,
        children=tuple((_whole(child["pid"]), _text(child["name"])) for child in data.get("children", ())),
        launched=(_whole(given["rank"]), _whole(given["world"]), _text(given["at"])) if given else None,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _whole(value: Any) -> int:
    # Wide enough for every pid, rank and world, and short enough to print.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r:.40} is no number of a process")
    return value


_Value = TypeVar("_Value")


def _optional(of: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else of(value)


def read(path: Path) -> Process:
    """The file of one process.

    Raises OSError where it cannot be read, ValueError where it is not a whole file of ultra-patches, and UltraPatchesError
    where another release wrote it in another format.
    """
    try:
        data = json.loads(untrusted.read(path))
        if isinstance(data, dict) and _whole(data.get("format", FORMAT)) != FORMAT:
            by = f"ultra-patches {data.get('overlay')}"
            raise UltraPatchesError(
                f"{path} has format {data['format']!r}, not {FORMAT}: read it with {by}, which wrote it"
            )
        return process_of(path.name, data)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} is no whole file of ultra-patches") from error
