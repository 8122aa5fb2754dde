"""`.metadata` of a distributed checkpoint: a pickle, of which only the classes that such a checkpoint needs are made.

A pickle names what it is made with, and a plain one would call whatever it names.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, planner
from torch.distributed.checkpoint import metadata as written
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.serialization import _get_layout

#: What torch's writers put there, and Megatron-Core's to 0.15 in place of torch's own.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_NEEDED: Mapping[tuple[str, str], Any] = {
    **{
        (written.__name__, name): getattr(written, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{(filesystem.__name__, name): getattr(filesystem, name) for name in ("_StorageInfo", "_StoragePrefix")},
    **{
        (planner.__name__, name): getattr(planner, name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    },
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): planner.SavePlan,
    ("torch.serialization", "_get_layout"): _get_layout,
    # Python 3.13 has its paths in another module.
    **{
        (module, name): PosixPath for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")
    },
}


class Refused(pickle.UnpicklingError):
    """The metadata names something that no distributed checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NEEDED:
            return _NEEDED[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if found is torch.Size or isinstance(found, (torch.dtype, torch.layout)):
            return found
        raise Refused(f"it names {module}.{name}, which no distributed checkpoint needs; nothing of it was run")


class Reader(FileSystemReader):
    """torch's reader of checkpoints, without its trust in the metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata. UnpicklingError, or what an unfit value raises, where it is none."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = load(file)
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def load(file: BinaryIO) -> Metadata:
    """The Metadata of a file. Refused where it names anything else, TypeError where it is none."""
    found = _Unpickler(file).load()
    if not isinstance(found, Metadata):
        raise TypeError(f"a {type(found).__name__} and no Metadata")
    return found
