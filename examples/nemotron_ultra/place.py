"""Files put into a folder of this machine: those that are right stay untouched, the others are fetched, checked and renamed into
place.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from examples.errors import RunError
from examples.nemotron_ultra.manifest import File, is_part, sha256

CHUNK = 16 << 20


class Source(Protocol):
    """Where files come from."""

    def fill(self, name: str, partial: Path) -> None:
        """Complete `partial`, of which the beginning may be there."""


@dataclass(frozen=True)
class Mirror:
    """A folder that every node sees."""

    folder: Path

    def fill(self, name: str, partial: Path) -> None:
        """Copy what is missing."""
        origin = self.folder / name
        if not origin.is_file():
            raise RunError(f"{origin} is not there on this node: mount the mirror on every node")
        with origin.open("rb") as source, open(partial, "ab", opener=_no_link) as target:
            source.seek(target.tell())
            shutil.copyfileobj(source, target, CHUNK)
            target.flush()
            os.fsync(target.fileno())


@dataclass(frozen=True)
class Hub:
    """A repository of the Hugging Face Hub at one commit."""

    repo: str
    commit: str

    def fill(self, name: str, partial: Path) -> None:
        """Download; huggingface_hub goes on with its own incomplete file."""
        from huggingface_hub import hf_hub_download

        work = partial.parent / ".hub"
        Path(hf_hub_download(self.repo, name, revision=self.commit, local_dir=work)).replace(partial)


@dataclass(frozen=True)
class Contents:
    """Small files that come with the task."""

    contents: dict[str, bytes]

    def fill(self, name: str, partial: Path) -> None:
        """Write it whole."""
        partial.unlink(missing_ok=True)
        with open(partial, "wb", opener=_no_link) as target:
            target.write(self.contents[name])


@dataclass(frozen=True)
class Part:
    """Files that go from a source into a folder below the target."""

    folder: str
    files: Sequence[File]
    source: Source


@dataclass(frozen=True)
class Placed:
    """What a node has after it: names of the files that were right and of those put in place, what else is there, and all as one hash."""

    right: list[str]
    repaired: list[str]
    written: int
    extra: list[str]
    digest: str


def place(parts: Sequence[Part], target: Path, threads: int) -> Placed:
    """Put every file in place, `threads` at a time. RunError where there is no room, or a source is not what was promised."""
    if strange := [file.name for part in parts for file in part.files if not is_file_name(file.name)]:
        raise RunError(f"{strange[0]!r} is not the name of a file: nothing was written; get the manifest again")
    try:
        return _place(parts, target, threads)
    except OSError as error:
        raise RunError(
            f"{error.filename or target}: {error.strerror or error}; what is whole stays: mend it and repeat the command"
        ) from error


def is_file_name(name: str) -> bool:
    """Whether it names something in a folder, and nothing above or below it."""
    return name not in {"", ".", ".."} and "/" not in name and "\0" not in name


def _place(parts: Sequence[Part], target: Path, threads: int) -> Placed:
    files = {(target / part.folder / file.name): (file, part.source) for part in parts for file in part.files}
    for part in parts:
        _make(target / part.folder)
    with _alone(target), ThreadPoolExecutor(threads) as pool:
        found = dict(zip(files, pool.map(lambda path: _is_right(path, files[path][0]), files), strict=True))
        wrong = [path for path, right in found.items() if not right]
        _room(target, sum(files[path][0].size - _length(_partial(path)) for path in wrong))
        list(pool.map(lambda path: _fetch(path, *files[path]), wrong))
    for part in parts:
        shutil.rmtree(target / part.folder / ".hub", ignore_errors=True)
    named = {path: str(path.relative_to(target)) for path in files}
    extra = sorted(
        str(path.relative_to(target))
        for part in parts
        for path in (target / part.folder).iterdir()
        if path not in files and is_part(path.name)
    )
    sums = sorted(f"{named[path]} {file.sha256}" for path, (file, _) in files.items())
    return Placed(
        right=sorted(named[path] for path, right in found.items() if right),
        repaired=sorted(named[path] for path in wrong),
        written=sum(files[path][0].size for path in wrong),
        extra=extra,
        digest=hashlib.sha256("\n".join([*sums, *extra]).encode()).hexdigest(),
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made ({error.strerror}): give another --to") from error


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Nodes that share a disk take turns; the lock ends with its process. Nothing that is there is emptied for it."""
    with open(target / ".stage.lock", "a", opener=_no_link) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _no_link(path: str, flags: int) -> int:
    """Open a file of our own: what lies there in its place, a link or a pipe, was not put there by us."""
    try:
        found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise
        raise RunError(f"{path} is no file of this command ({error.strerror}): remove it") from error
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise RunError(f"{path} is no file of this command: remove it")
    return found


def _is_right(path: Path, file: File) -> bool:
    return path.is_file() and path.stat().st_size == file.size and sha256(path) == file.sha256


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise RunError(
            f"{target} needs {needed:,} bytes more and has {free:,} free: make room there, or give another --to; nothing was "
            "written"
        )


def _fetch(path: Path, file: File, source: Source) -> None:
    partial = _partial(path)
    continued = _length(partial) > 0
    try:
        source.fill(file.name, partial)
    except OSError as error:
        raise RunError(f"{path.name}: {error.strerror or error}; what is whole stays: repeat the command") from error
    if _is_right(partial, file):
        partial.replace(path)
        return
    partial.unlink(missing_ok=True)
    if continued:
        _fetch(path, file, source)
        return
    raise RunError(
        f"{path.name} from {source.__class__.__name__.lower()} is not what its manifest says (sha256 {file.sha256[:12]}…): get "
        "that file again, there"
    )
