"""Keeps the file of this process under `ULTRA_PATCHES_RUN_DIR`, one JSON file a process.

Made for a shared file system and processes that die at any time: a process writes its own file only, whole under a name
that readers ignore, and renames it. There is no lock and nothing to clean up. Imported only where the variable is set.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ultra_patches.core.facts import UPSTREAMS
from ultra_patches.run_dir import children
from ultra_patches.run_dir.record import FORMAT, process_of

if TYPE_CHECKING:
    from ultra_patches.core.ledger import PatchStatus

_started: dict[int, int] = {}
_count = itertools.count()


def write(folder: str | os.PathLike[str], rows: Sequence[PatchStatus], host: str | None = None) -> str | None:
    """Write or replace the file of this process. One line where that cannot be done, None where it was."""
    host = host or platform.node() or "unknown"
    pid = os.getpid()
    # A pid is used again, and by containers of the same name at once: the time tells the processes apart.
    name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:100]}-{pid}-{_started.setdefault(pid, time.time_ns())}.json"
    temporary = Path(folder, f".{name}.{threading.get_ident()}.{next(_count)}.tmp")
    try:
        text = json.dumps(_content(rows, host, pid), indent=1)
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("x", encoding="ascii") as file:
                file.write(text)
            temporary.replace(Path(folder, name))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except Exception as error:  # noqa: BLE001 # a null character in the path, a row of a broken declaration: no end of a user's program
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
        "launched": children.launched(),
        "children": children.started(),
        "python": platform.python_version(),
        "overlay": overlay,
        "upstreams": upstreams,
        "patches": patches,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    process = process_of("", content)
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


_THAT_FORK_TO_RUN = {("subprocess", "_execute_child"), ("os", "_spawnvef"), ("pty", "spawn")}


def _becomes_another_program() -> bool:
    """Whether this fork is one that the standard library makes only to run something else in it: its file would tell lies.

    `subprocess` calls the hooks of a fork where it is given `preexec_fn`.
    """
    caller: FrameType | None = sys._getframe(2)  # of `_forked`: whoever forks
    for _ in range(2):
        if caller is None:
            break
        if (caller.f_globals.get("__name__"), caller.f_code.co_name) in _THAT_FORK_TO_RUN:
            return True
        caller = caller.f_back
    return False


#: The writer of this process, while the overlay is armed.
_kept: list[Writer] = []


def keep(folder: str) -> None:
    """Keep the file of this process in a folder up to date until the overlay disarms; a second call changes nothing."""
    from ultra_patches.core import overlay  # here, as reading the folder needs none of it

    if not _kept:
        _kept.append(Writer(folder, overlay.status))
        overlay.listen(_kept[0].refresh, lambda: _kept.pop().stop())


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
        children.watch(self.refresh)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def refresh(self) -> str | None:
        """Write the file as things are now; one line where that cannot be done.

        Never waits: while another thread, or an outer call, is writing, that one is left to write once more.
        """
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
        children.unwatch()
        atexit.unregister(self.refresh)

    def _forked(self) -> None:
        self._busy = threading.Lock()  # a thread of the parent may have held it
        if self._stopped or _becomes_another_program():
            return
        self._again()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # a child of multiprocessing gets its name later, and runs no atexit
            util.register_after_fork(self, Writer._named)

    def _named(self) -> None:
        self._again()
        sys.modules["multiprocessing.util"].Finalize(None, self.refresh, exitpriority=0)

    def _again(self) -> None:
        # Imports nothing and asks for no status: a thread of the parent may have held the lock of a module at the fork.
        if not self._stopped:
            write(self._folder, self._last, self._host)
