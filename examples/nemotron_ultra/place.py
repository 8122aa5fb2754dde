"""Files put into a folder of this machine: those that are right stay untouched, the others are fetched, checked and renamed into
place.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
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
        with origin.open("rb") as source, partial.open("ab") as target:
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
        partial.write_bytes(self.contents[name])


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
    """Nodes that share a disk take turns; the lock ends with its process."""
    with (target / ".stage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
    partial.unlink()
    if continued:
        _fetch(path, file, source)
        return
    raise RunError(
        f"{path.name} from {source.__class__.__name__.lower()} is not what its manifest says (sha256 {file.sha256[:12]}…): get "
        "that file again, there"
    )
