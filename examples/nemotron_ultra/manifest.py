"""Which files a model has, how long they are and what they hash to; and whether a model is whole.

From a folder the hashes are computed once and kept in it as `stage-manifest.json`; from the Hugging Face Hub they are those that
it keeps for files in LFS.
"""

import hashlib
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.errors import RunError

MANIFEST = "stage-manifest.json"
INDEX = "model.safetensors.index.json"
#: What a checkpoint consists of: shards, index, configuration, tokenizer, chat template and custom code.
SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".py", ".model", ".txt"})


@dataclass(frozen=True)
class File:
    """A file by name, length in bytes and SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


def is_part(name: str) -> bool:
    """Whether a file of this name belongs to a checkpoint, rather than to its page or to this tool."""
    return Path(name).suffix in SUFFIXES and name != MANIFEST and not name.startswith(".") and "/" not in name


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_bytes(name: str, content: bytes) -> File:
    """The manifest's line for a file of this content."""
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def of_folder(folder: Path, threads: int) -> list[File]:
    """The manifest of a mirror. Files that are new in it are hashed; RunError where one is not as it was, or is cut short."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and is_part(path.name))
    known = _kept(folder)
    for name in sorted(known):
        _unchanged(folder, known[name])
    for name in names:
        _not_cut_short(folder / name)
    with ThreadPoolExecutor(threads) as pool:
        fresh = pool.map(lambda name: _measure(folder / name), [name for name in names if name not in known])
        files = sorted([*known.values(), *fresh], key=lambda file: file.name)
    whole({file.name for file in files}, lambda name: (folder / name).read_bytes(), str(folder))
    if len(files) > len(known):
        _keep(folder, files)
    return files


def of_hub(repo: str, revision: str | None) -> tuple[list[File], str]:
    """The manifest of a repository of the Hub, and the commit it is of. Small files, whose hash it does not keep, are fetched."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        parts = [one for one in info.siblings or [] if is_part(one.rfilename)]
        small = {
            one.rfilename: Path(hf_hub_download(repo, one.rfilename, revision=info.sha)) for one in parts if not one.lfs
        }
    except OfflineModeIsEnabled as error:
        raise RunError(f"--model {repo}: HF_HUB_OFFLINE is set and this is no folder: give --mirror FOLDER") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"--model {repo}: the Hub does not give it ({reason}): check the name and HF_TOKEN, or give --mirror FOLDER"
        ) from error
    files = [
        File(one.rfilename, one.lfs.size, one.lfs.sha256) if one.lfs else _measure(small[one.rfilename])
        for one in parts
    ]
    found = {file.name for file in files}
    whole(
        found, lambda name: (small.get(name) or Path(hf_hub_download(repo, name, revision=info.sha))).read_bytes(), repo
    )
    return files, str(info.sha)


def whole(names: set[str], read: Any, where: str) -> None:
    """RunError unless a checkpoint of these files can be loaded and prompted; `read` gives the bytes of one."""
    if "config.json" not in names:
        raise RunError(f"{where}: no config.json: give the folder of a Hugging Face checkpoint")
    shards = set(_json(read, INDEX, where)["weight_map"].values()) if INDEX in names else {"model.safetensors"}
    if missing := sorted(shards - names):
        named = f"of the shards that {INDEX} names" if INDEX in names else f"and no {INDEX}"
        raise RunError(f"{where}: {missing[0]} is missing, {len(missing)} {named}: get it, then repeat the command")
    settings = _json(read, "tokenizer_config.json", where) if "tokenizer_config.json" in names else {}
    if "chat_template.jinja" not in names and not settings.get("chat_template"):
        raise RunError(
            f"{where}: no chat_template.jinja, so that prompts would have no roles: get it from the model's repository"
        )


def _json(read: Any, name: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(read(name))
    except ValueError as error:
        raise RunError(f"{where}/{name} is no JSON ({error}): get this file again") from error
    return found if isinstance(found, dict) else {}


def _measure(path: Path) -> File:
    return File(path.name, path.stat().st_size, sha256(path))


def _kept(folder: Path) -> dict[str, File]:
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        return {row["name"]: File(**row) for row in json.loads(path.read_text())["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is not a manifest: remove it, and it is computed again") from error


def _unchanged(folder: Path, file: File) -> None:
    path = folder / file.name
    if not path.is_file():
        raise RunError(
            f"{path} is missing, {MANIFEST} has it: get it again, or remove the manifest of another revision"
        )
    if path.stat().st_size != file.size:
        raise RunError(
            f"{path} has {path.stat().st_size:,} bytes, {MANIFEST} says {file.size:,}: get this file again, or remove the "
            "manifest of another revision"
        )


def _not_cut_short(path: Path) -> None:
    """A shard says in its header how long it is (safetensors' format: 8 bytes of length, JSON, then the tensors)."""
    if path.suffix != ".safetensors":
        return
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        wanted = (
            8 + length + max((row["data_offsets"][1] for name, row in header.items() if name[:2] != "__"), default=0)
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: its header is not that of a safetensors file: get this file again") from error
    if size != wanted:
        raise RunError(f"{path} has {size:,} of {wanted:,} bytes: get this file again")


def _keep(folder: Path, files: list[File]) -> None:
    partial = folder / f".{MANIFEST}.{os.getpid()}"
    try:
        partial.write_text(json.dumps({"files": [asdict(file) for file in files]}, indent=1) + "\n")
        partial.replace(folder / MANIFEST)
    except OSError as error:
        print(f"note: {folder} takes no {MANIFEST} ({error.strerror}): its files are hashed again the next time")
