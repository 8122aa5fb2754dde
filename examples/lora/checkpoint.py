"""A Megatron `torch_dist` checkpoint, read with torch alone.

It is a folder of torch's distributed checkpoint format: `.metadata` names every tensor, its whole shape and which bytes of
which `.distcp` file hold which part, whatever ranks wrote it.
"""

import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from examples.errors import RunError, first_line, json_file
from examples.lora import metadata

RUN_CONFIG = "run_config.yaml"
LATEST = "latest_checkpointed_iteration.txt"

#: What Megatron's and Bridge's writers put before a model's own names, a virtual pipeline stage or none.
_WRAPPERS = re.compile(r"^(?:(?:model\d*|module)\.)+")
#: What reading bytes of a wrong length or kind has been seen to raise.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,  # RecursionError is one
    TypeError,
    AssertionError,
    OverflowError,
    MemoryError,
    pickle.UnpicklingError,
)
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class Entry:
    """One whole tensor of a checkpoint: its key, the model's name for it, and in how many parts its rows were written."""

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_parts: int

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return int(math.prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `.metadata`, its tensors, the names of its pickled objects, and the run's configuration."""

    folder: Path
    tensors: tuple[Entry, ...]
    objects: tuple[str, ...]
    run_config: dict[str, Any]


def read(path: Path) -> Checkpoint:
    """Read everything but the tensors' values. `path` is a checkpoint, or a folder of them, of which the latest counts.

    Raises:
        RunError: nothing there, metadata that cannot be read, a file of it that is missing or cut short, a tensor of which
            a part was never written, or no run configuration.
    """
    folder = _locate(path)
    found = _metadata(folder)
    tensors, objects = [], []
    try:
        _check_files(folder, found)
        for key, stored in found.state_dict_metadata.items():
            name = _WRAPPERS.sub("", key)
            if isinstance(stored, TensorStorageMetadata):
                tensors.append(_entry(folder, key, name, stored))
            elif isinstance(stored, BytesStorageMetadata):
                objects.append(name)
            else:
                raise TypeError(f"{key} is a {type(stored).__name__}")
    except _UNREADABLE as error:
        raise RunError(_damaged(folder, error)) from error
    return Checkpoint(folder, tuple(tensors), tuple(objects), _run_config(folder))


def load(
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    track: Callable[[Sequence[Sequence[Entry]]], Iterable[Sequence[Entry]]] = iter,
) -> dict[str, Tensor]:
    """The whole tensors of the entries by key, on the CPU, in the dtype and shape that they were written in.

    Raises:
        RunError: one cannot be read, or has a value that is no number, which an adapter would carry into every answer.
    """
    loaded: dict[str, Tensor] = {}
    for batch in track(list(_batches(entries))):
        try:
            part = {entry.key: torch.empty(entry.shape, dtype=entry.dtype) for entry in batch}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(part, storage_reader=metadata.Reader(checkpoint.folder), no_dist=True)
        except (CheckpointException, *_UNREADABLE) as error:
            raise RunError(
                f"{checkpoint.folder}: {batch[0].key} or one of the {len(batch) - 1} tensors after it cannot be read "
                f"({first_line(error)}): a .distcp file is damaged, copy the checkpoint again"
            ) from error
        for key, values in part.items():
            _finite(checkpoint.folder, key, values)
        loaded |= part
    return loaded


def _finite(folder: Path, key: str, values: Tensor) -> None:
    if wrong := int((~values.float().isfinite()).sum()):
        raise RunError(
            f"{folder}: {key} has {wrong} of {values.numel()} values that are NaN or infinite: the training had gone astray; take "
            "an earlier checkpoint"
        )


def _batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    for entry in entries:
        batch.append(entry)
        if sum(one.bytes for one in batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _locate(path: Path) -> Path:
    if not path.is_dir():
        raise RunError(
            f"{path}: no such folder; give a Megatron checkpoint, a folder that holds `.metadata` or `iter_*`"
        )
    if (path / ".metadata").is_file():
        return path
    if (path / LATEST).is_file():
        latest = (path / LATEST).read_text(errors="replace").strip()
        if not re.fullmatch("[0-9]{1,15}|release", latest):
            raise RunError(f"{path / LATEST} says {latest[:80]!r}, which is no iteration: give an iter_* folder itself")
        folder = path / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
        if not (folder / ".metadata").is_file():
            raise RunError(
                f"{path / LATEST} says {latest!r}, and {folder} holds no `.metadata`: give a whole checkpoint"
            )
        return folder
    iterations = sorted(one.parent for one in path.glob("iter_*/.metadata"))
    if not iterations:
        raise RunError(f"{path}: neither `.metadata` nor `iter_*` in it; give a checkpoint written as torch_dist")
    return iterations[-1]


def _metadata(folder: Path) -> Metadata:
    backend = folder / "metadata.json"
    again = "copy the checkpoint again"
    kind = json_file(backend, again).get("sharded_backend") if backend.is_file() else "torch_dist"
    if kind != "torch_dist":
        raise RunError(f"{backend}: the checkpoint is written as {kind}; only torch_dist is read here")
    try:
        return metadata.Reader(folder).read_metadata()
    except metadata.Refused as error:
        raise RunError(f"{folder / '.metadata'}: refused, {error}: take it for hostile, or get it again") from error
    except _UNREADABLE as error:
        raise RunError(_damaged(folder, error)) from error


def _damaged(folder: Path, error: BaseException) -> str:
    return f"{folder / '.metadata'}: cannot be read ({type(error).__name__}: {first_line(error)}); copy the checkpoint again"


def _check_files(folder: Path, found: Metadata) -> None:
    """Each file is one of this folder, and must reach to the end of what the metadata says lies in it."""
    ends: dict[str, int] = {}
    for index, stored in cast("dict[Any, Any]", found.storage_data).items():
        if not isinstance(index, MetadataIndex) or Path(stored.relative_path).name != stored.relative_path:
            raise ValueError(f"{str(stored.relative_path)[:80]!r} is no file of this folder")
        if stored.offset < 0 or stored.length < 0:
            raise ValueError(f"{stored.relative_path} has a part of {stored.length} bytes at {stored.offset}")
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file():
            raise RunError(f"{file}: missing, and `.metadata` places tensors in it; copy the checkpoint again")
        if (size := file.stat().st_size) < end:
            raise RunError(f"{file}: cut short, {size} bytes of at least {end}; copy the checkpoint again")


def _entry(folder: Path, key: str, name: str, stored: TensorStorageMetadata) -> Entry:
    shape = tuple(stored.size)
    if not isinstance(stored.properties.dtype, torch.dtype) or any(size < 0 for size in shape):
        raise TypeError(f"{key} has dtype {stored.properties.dtype} and shape {list(shape)}")
    written = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    if written != math.prod(shape):
        raise RunError(
            f"{folder}: {key} has {written} of {math.prod(shape)} values: some rank did not write its part; "
            "take a checkpoint of all ranks"
        )
    rows = len({chunk.offsets[-2] for chunk in stored.chunks}) if len(shape) > 1 else 1
    return Entry(key, name, shape, stored.properties.dtype, rows)


def _run_config(folder: Path) -> dict[str, Any]:
    """Bridge writes it into the checkpoint; a driver that keeps several folders a step, beside it."""
    for file in (folder / RUN_CONFIG, folder.parent / RUN_CONFIG):
        if file.is_file():
            break
    else:
        raise RunError(f"{folder / RUN_CONFIG}: missing; rank, alpha and dropout are the run's and are read from there")
    try:
        config = yaml.safe_load(file.read_text())
    # A date like 2001-99-99 is a ValueError, a list in a list in a list … a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise RunError(f"{file}: not YAML ({first_line(error)})") from error
    if not isinstance(config, dict):
        raise RunError(f"{file}: expected sections, among them `peft`, found {type(config).__name__}")
    return config | {"file": str(file)}
