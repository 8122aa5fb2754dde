"""One JSON file a process under `ULTRA_PATCHES_RUN_DIR`, and what a person reads out of the folder afterwards.

Made for a shared file system and processes that die at any time: a process writes its own file only, whole under a name
that readers ignore, and renames it. There is no lock and nothing to clean up. Imported only where the variable is set.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultra_patches.errors import UltraPatchesError
from ultra_patches.facts import UPSTREAMS

if TYPE_CHECKING:
    from ultra_patches.ledger import PatchStatus

FORMAT = 1
HEADINGS = ("host", "pid", "rank", "role", "imported", "digest", "patches")
IN_FORCE = "in force"
_BAD = ("drifted", "conflict", "failed")  # as gate.BAD

_started: dict[int, int] = {}
_count = itertools.count()


def write(folder: str | os.PathLike[str], rows: Sequence[PatchStatus], host: str | None = None) -> str | None:
    """Write or replace the file of this process. One line where that cannot be done, None where it was."""
    host = host or platform.node() or "unknown"
    pid = os.getpid()
    # The time tells a process from one that had its pid before, or has it in another container of the same name.
    name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:100]}-{pid}-{_started.setdefault(pid, time.time_ns())}.json"
    text = json.dumps(_content(rows, host, pid), indent=1)
    temporary = Path(folder, f".{name}.{threading.get_ident()}.{next(_count)}.tmp")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("x", encoding="ascii") as file:
                file.write(text)
            temporary.replace(Path(folder, name))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        why = (error.strerror if isinstance(error, OSError) else None) or error
        return f"ULTRA_PATCHES_RUN_DIR={os.fspath(folder)!r} cannot be written ({why}): name a folder that every process may write"
    return None


def _content(rows: Sequence[PatchStatus], host: str, pid: int) -> dict[str, Any]:
    overlay = str(getattr(sys.modules.get("ultra_patches"), "__version__", None))
    upstreams = {
        row.upstream: {
            "version": row.version,
            "imported": UPSTREAMS.get(row.upstream, (row.upstream.replace("-", "_"),))[0] in sys.modules,
        }
        for row in rows
        if row.version is not None or row.state.value != "not-installed"
    }
    patches = {row.id: {"upstream": row.upstream, "state": row.state.value, "reason": row.reason} for row in rows}
    content = {
        "format": FORMAT,
        "host": host,
        "pid": pid,
        "ppid": os.getppid(),
        "rank": _rank(),
        "role": _role(),
        "python": platform.python_version(),
        "overlay": overlay,
        "upstreams": upstreams,
        "patches": patches,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    process = _process("", content)
    # What is armed counts as set here; `read` knows what became of it in the others.
    content["digest"] = {name: process.digest(name, {}) for name in process.imported}
    return content


def _own_name() -> str:
    """The name that multiprocessing gave this process, empty for one that it did not start."""
    loaded = sys.modules.get("multiprocessing.process")
    name = str(loaded.current_process().name) if loaded and hasattr(loaded, "current_process") else ""
    return "" if name == "MainProcess" else name


def _rank() -> int | None:
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):  # torch may be in the middle of its import
        if distributed is not None and distributed.is_initialized():
            return int(distributed.get_rank())
    worker = re.fullmatch(r"VllmWorker-(\d+)", _own_name())
    # What vLLM calls its worker comes first: the environment is that of whoever started it.
    for text in (worker[1] if worker else "", os.environ.get("RANK", ""), os.environ.get("LOCAL_RANK", "")):
        if text.isascii() and text.isdigit():
            return int(text)
    return None


def _role() -> str:
    """What this process is, as it calls itself: its title, the name of the child process, or the program."""
    with contextlib.suppress(OSError):
        title = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
        if "::" in title and "/" not in title:  # VLLM::EngineCore, ray::Actor.method
            return title.split(".")[0]
    if name := _own_name():
        return name
    given = sys.orig_argv
    if sys.argv[:1] == ["-m"] and "-m" in given[:-1]:
        return given[given.index("-m") + 1]
    return (Path(sys.argv[0]).name if sys.argv else "") or "python"


class Writer:
    """Keeps the file of this process up to date, and gives a forked child its own."""

    def __init__(self, folder: str, rows: Callable[[], Sequence[PatchStatus]], host: str | None = None) -> None:
        self._folder = os.path.abspath(folder)  # noqa: PTH100 # the program may change its folder; resolve() would ask the disk
        self._rows, self._host = rows, host
        self._last: Sequence[PatchStatus] = ()
        self._due = False
        self._busy = threading.Lock()
        self._stopped = False
        atexit.register(self.refresh)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def refresh(self) -> str | None:
        """Write what is so now. Never waits: who finds another thread, or itself, at it leaves it to that one."""
        said = None
        self._due = not self._stopped
        while self._due and self._busy.acquire(blocking=False):
            try:
                self._due = False
                self._last = self._rows()
                said = write(self._folder, self._last, self._host)
            finally:
                self._busy.release()
        return said

    def stop(self) -> None:
        """Write no more. What is written stays."""
        self._stopped = True
        atexit.unregister(self.refresh)

    def _forked(self) -> None:
        self._busy = threading.Lock()  # the thread that held it may not be here
        if self._stopped:
            return
        self._again()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # a child of multiprocessing gets its name later, and runs no atexit
            util.register_after_fork(self, Writer._named)

    def _named(self) -> None:
        self._again()
        sys.modules["multiprocessing.util"].Finalize(None, self.refresh, exitpriority=0)

    def _again(self) -> None:
        # Nothing is imported or asked here, as another thread of the parent may hold the lock of a module.
        if not self._stopped:
            write(self._folder, self._last, self._host)


@dataclass(frozen=True)
class Process:
    """What one process wrote. `patches` holds (upstream, state, reason), `imported` the versions of what is loaded."""

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

    @property
    def name(self) -> str:
        return f"{self.host} pid {self.pid} rank {'-' if self.rank is None else self.rank} ({self.role})"

    def kind(self, patch_id: str) -> str:
        """The state as far as it matters to others; `armed` fits whatever became of the patch elsewhere."""
        state = self.patches[patch_id][1] if patch_id in self.patches else "not declared"
        return IN_FORCE if state in ("applied", "applied-late") else state

    def digest(self, upstream: str, usual: Mapping[str, str]) -> str:
        """The same for the same release, overlay and patches. What is armed counts as `usual`, else as in force."""
        ids = sorted(name for name, (of, _, _) in self.patches.items() if of == upstream)
        kinds = [(name, usual.get(name, IN_FORCE) if self.kind(name) == "armed" else self.kind(name)) for name in ids]
        text = json.dumps([upstream, self.imported.get(upstream), self.overlay, kinds])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Report:
    """A folder as it was read. `broken` has a line a file, `groups` the processes by upstream and digest."""

    processes: tuple[Process, ...]
    broken: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, dict[str, tuple[Process, ...]]]:
        found: dict[str, dict[str, tuple[Process, ...]]] = {}
        for upstream, users in _users(self).items():
            usual = _usual_kinds(upstream, users)
            for user in users:
                group = found.setdefault(upstream, {})
                digest = user.digest(upstream, usual)
                group[digest] = (*group.get(digest, ()), user)
        return found


def read(folder: str | os.PathLike[str]) -> Report:
    """Read every file of a run. Raises UltraPatchesError where there is none, or one of another format."""
    try:
        names = sorted(
            path.name for path in Path(folder).iterdir() if path.suffix == ".json" and not path.name.startswith(".")
        )
    except OSError as error:
        raise UltraPatchesError(f"{os.fspath(folder)} cannot be read: {error.strerror}") from error
    processes, broken = [], []
    for name in names:
        path = Path(folder, name)
        try:
            data = json.loads(_bytes(path))
            if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
                by = f"ultra-patches {data.get('overlay')}"
                raise UltraPatchesError(
                    f"{path} has format {data['format']!r}, not {FORMAT}: read it with {by}, which wrote it"
                )
            processes.append(_process(name, data))
        except FileNotFoundError:  # deleted since it was listed
            continue
        except OSError as error:
            broken.append(f"{name} cannot be read: {error.strerror}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            broken.append(f"{name} is no whole file of ultra-patches")
    if not processes and not broken:
        raise UltraPatchesError(
            f"no process wrote to {os.fspath(folder)}: set ULTRA_PATCHES_RUN_DIR to it on every host"
        )
    return Report(tuple(sorted(processes, key=lambda p: (p.host, p.pid, p.file))), tuple(broken))


def _bytes(path: Path) -> bytes:
    for _ in range(3):
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE:  # on NFS: replaced by another host while it was open here
                raise
    return path.read_bytes()


def _process(name: str, data: Mapping[str, Any]) -> Process:
    installed = {str(key): value["version"] for key, value in data["upstreams"].items()}
    imported = {key: version for key, version in installed.items() if data["upstreams"][key]["imported"]}
    patches = {
        str(key): (str(value["upstream"]), str(value["state"]), str(value["reason"]))
        for key, value in data["patches"].items()
    }
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
    )


def _users(report: Report) -> dict[str, list[Process]]:
    names = sorted({name for process in report.processes for name in process.imported})
    return {name: [process for process in report.processes if name in process.imported] for name in names}


def _usual(words: Iterable[str]) -> tuple[str, int]:
    """The most frequent word and how often; of several, the one that says that a patch is in force."""
    counts = Counter(words)
    word = max(sorted(counts), key=lambda word: (counts[word], word == IN_FORCE, word != "not declared"))
    return word, counts[word]


def _usual_kinds(upstream: str, users: Sequence[Process]) -> dict[str, str]:
    """What became of each patch in most processes that declare it and have come so far."""
    ids = sorted({name for user in users for name, (of, _, _) in user.patches.items() if of == upstream})
    settled = {name: [u.kind(name) for u in users if u.kind(name) not in ("armed", "not declared")] for name in ids}
    return {name: _usual(kinds)[0] if kinds else IN_FORCE for name, kinds in settled.items()}


def differences(report: Report) -> list[str]:
    """A line for each process that imported an upstream and has not what most of the others have."""
    lines: dict[str, None] = {}
    for upstream, users in _users(report).items():
        version, of_version = _usual(str(user.imported[upstream]) for user in users)
        overlay, of_overlay = _usual(user.overlay for user in users)
        kinds = {
            patch_id: [usual if (kind := user.kind(patch_id)) == "armed" else kind for user in users]
            for patch_id, usual in _usual_kinds(upstream, users).items()
        }
        for number, user in enumerate(users):
            found = str(user.imported[upstream])
            if found != version:
                lines[f"{user.name}: {upstream} {found}, {version} in {of_version} of {len(users)}"] = None
            if user.overlay != overlay:
                lines[f"{user.name}: ultra-patches {user.overlay}, {overlay} in {of_overlay} of {len(users)}"] = None
            for patch_id, all_kinds in kinds.items():
                kind, of_kind = _usual(all_kinds)
                mine = all_kinds[number]
                # Another release may well need another correction; the release itself is named above.
                if mine == kind or (found != version and {mine, kind} == {IN_FORCE, "not-needed"}):
                    continue
                why = f" ({user.patches[patch_id][2]})" if patch_id in user.patches else ""
                lines[f"{user.name}: {patch_id} {user.kind(patch_id)}{why}, {kind} in {of_kind} of {len(users)}"] = None
    return list(lines)


def problems(report: Report) -> list[str]:
    """Everything that fails a run: differences, needed corrections that are nowhere in force, and broken files."""
    lacking: dict[str, list[str]] = {}
    for user in report.processes:
        for patch_id, (upstream, state, reason) in user.patches.items():
            if upstream in user.imported and state in _BAD:
                lacking.setdefault(f"{patch_id} {state} ({reason})", []).append(user.name)
    several = [f"{what} in {len(names)} processes, first {names[0]}" for what, names in sorted(lacking.items())]
    return [*differences(report), *several, *report.broken]


def table(report: Report) -> list[tuple[str, ...]]:
    """One row of texts a process, under HEADINGS."""
    digests = {
        (user.file, name): digest
        for name, group in report.groups.items()
        for digest, users in group.items()
        for user in users
    }
    rows: list[tuple[str, ...]] = []
    for process in report.processes:
        counts = Counter(map(process.kind, process.patches))
        patches = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        imported = ", ".join(f"{name} {version or '?'}" for name, version in process.imported.items()) or "-"
        shown = ", ".join(digests[process.file, name] for name in process.imported) or "-"
        rank = "-" if process.rank is None else str(process.rank)
        rows.append((process.host, str(process.pid), rank, process.role, imported, shown, patches))
    return rows
