"""What one process has written about itself under `ULTRA_PATCHES_RUN_DIR`, as data."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    installed = {str(key): value["version"] for key, value in data["upstreams"].items()}
    imported = {key: version for key, version in installed.items() if data["upstreams"][key]["imported"]}
    patches = {
        str(key): (str(value["upstream"]), str(value["state"]), str(value["reason"]))
        for key, value in data["patches"].items()
    }
    given = data.get("launched")
    return Process(
        file=name,
        host=str(data["host"]),
        pid=int(data["pid"]),
        ppid=int(data["ppid"]),
        rank=None if data["rank"] is None else int(data["rank"]),
        role=str(data["role"]),
        python=str(data["python"]),
        overlay=str(data["overlay"]),
        time=str(data["time"]),
        imported=imported,
        installed=installed,
        patches=patches,
        children=tuple((int(child["pid"]), str(child["name"])) for child in data.get("children", ())),
        launched=(int(given["rank"]), int(given["world"]), str(given["at"])) if given else None,
    )


def read(path: Path) -> Process:
    """The file of one process.

    Raises OSError where it cannot be read, ValueError where it is not a whole file of ultra-patches, and UltraPatchesError
    where another release wrote it in another format.
    """
    try:
        data = json.loads(_bytes(path))
        if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            by = f"ultra-patches {data.get('overlay')}"
            raise UltraPatchesError(
                f"{path} has format {data['format']!r}, not {FORMAT}: read it with {by}, which wrote it"
            )
        return process_of(path.name, data)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} is no whole file of ultra-patches") from error


def _bytes(path: Path) -> bytes:
    for _ in range(3):
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE:  # on NFS: replaced by another host while it was open here
                raise
    return path.read_bytes()
