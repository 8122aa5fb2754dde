"""Which files a model has, how long they are and what they hash to; and whether a model is whole.

From a folder the hashes are computed once and kept in it as `stage-manifest.json`, with what tells that a file was not written since;
from the Hugging Face Hub they are those that it keeps for files in LFS.
"""

import hashlib
import json
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.errors import RunError, first_line, json_file, json_object

MANIFEST = "stage-manifest.json"
INDEX = "model.safetensors.index.json"
#: What a checkpoint consists of: shards, index, configuration, tokenizer, chat template and custom code.
SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".py", ".model", ".txt"})
AGAIN = "get this file again"
#: Bytes of the longest header that the safetensors format has.
LONGEST_HEADER = 100_000_000
#: When a file was last written and changed, in ns, and its inode. One that is written over has another, whatever its length is.
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class File:
    """A file by name, length in bytes and SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Kept:
    """A line of a mirror's manifest: a file, and its stamp when it was hashed; None is that of an earlier release."""

    file: File
    stamp: Stamp | None


def is_part(name: str) -> bool:
    """Whether a file of this name belongs to a checkpoint, rather than to its page or to this tool. No other folder is one's."""
    return (
        Path(name).suffix in SUFFIXES
        and name != MANIFEST
        and not name.startswith(".")
        and "/" not in name
        and name.isprintable()
    )


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_bytes(name: str, content: bytes) -> File:
    """The manifest's line for a file of this content."""
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def of_folder(folder: Path, threads: int) -> list[File]:
    """The manifest of a mirror. Files that are new in it, or were written since, are hashed; RunError where one is not as it was,
    or is cut short.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and is_part(path.name))
    known = _kept(folder)
    for name in sorted(known):
        _same_length(folder, known[name].file)
    for name in names:
        _not_cut_short(folder / name)
    still = {name for name, line in known.items() if line.stamp == _stamp(folder / name)}
    with ThreadPoolExecutor(threads) as pool:
        read = pool.map(lambda name: _measure(folder / name), [name for name in names if name not in still])
        lines = {line.file.name: line for line in read}
    if others := [name for name, line in lines.items() if name in known and line.file != known[name].file]:
        raise RunError(
            f"{folder / others[0]} is not the file that {MANIFEST} was made of, {len(others)} of {len(known)} are not: remove the "
            "manifest where another revision was put there, else get them again"
        )
    lines = {**known, **lines}
    files = [lines[name].file for name in sorted(lines)]
    whole(set(lines), lambda name: (folder / name).read_bytes(), str(folder))
    if lines != known:
        _keep(folder, [lines[name] for name in sorted(lines)])
    return files


def of_hub(repo: str, revision: str | None) -> tuple[list[File], str]:
    """The manifest of a repository of the Hub, and the commit it is of. Small files, whose hash it does not keep, are fetched."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        parts = [one for one in info.siblings or [] if is_part(one.rfilename)]
        small = {
            one.rfilename: Path(hf_hub_download(repo, one.rfilename, revision=info.sha)) for one in parts if not one.lfs
        }
    except OfflineModeIsEnabled as error:
        raise RunError(f"--model {repo}: HF_HUB_OFFLINE is set and this is no folder: give --mirror FOLDER") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise RunError(
            f"--model {repo}: the Hub does not give it ({first_line(error)}): check the name and HF_TOKEN, or give --mirror FOLDER"
        ) from error
    files = [
        File(one.rfilename, one.lfs.size, one.lfs.sha256) if one.lfs else _measure(small[one.rfilename]).file
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
    shards = (
        _shards(json_object(read(INDEX), f"{where}/{INDEX}", AGAIN), where) if INDEX in names else {"model.safetensors"}
    )
    if missing := sorted(shards - names):
        named = f"of the shards that {INDEX} names" if INDEX in names else f"and no {INDEX}"
        raise RunError(f"{where}: {missing[0]} is missing, {len(missing)} {named}: get it, then repeat the command")
    name = "tokenizer_config.json"
    settings = json_object(read(name), f"{where}/{name}", AGAIN) if name in names else {}
    if "chat_template.jinja" not in names and not settings.get("chat_template"):
        raise RunError(
            f"{where}: no chat_template.jinja, so that prompts would have no roles: get it from the model's repository"
        )


def _shards(index: dict[str, Any], where: str) -> set[str]:
    named = index.get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise RunError(f"{where}/{INDEX}: its `weight_map` does not name a file for each tensor: {AGAIN}")
    return set(named.values())


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _measure(path: Path) -> Kept:
    stamp = _stamp(path)
    found = File(path.name, path.stat().st_size, sha256(path))
    if _stamp(path) != stamp:
        raise RunError(f"{path} was written while it was hashed: repeat the command when the mirror is whole")
    return Kept(found, stamp)


def _kept(folder: Path) -> dict[str, Kept]:
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        return {}
    then = "it is not a manifest: remove it, and it is computed again"
    rows = json_file(path, then).get("files")
    if not isinstance(rows, list):
        raise RunError(f"{path}: no list of files; {then}")
    lines = [_line(row) for row in rows]
    if wrong := [row for row, line in zip(rows, lines, strict=True) if line is None]:
        raise RunError(f"{path}: {str(wrong[0])[:80]} is no file of this folder; {then}")
    found = {line.file.name: line for line in lines if line is not None}
    if len(found) < len(lines):
        raise RunError(f"{path}: two lines for one file; {then}")
    return found


def _line(row: Any) -> Kept | None:
    """A row of the manifest, which may be of anybody's making."""
    if not isinstance(row, dict):
        return None
    name, size, digest, stamp = (row.get(key) for key in ("name", "size", "sha256", "stamp"))
    if not isinstance(name, str) or not is_part(name) or type(size) is not int or size < 0:
        return None
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        return None
    if stamp is None:
        return Kept(File(name, size, digest), None)
    if not isinstance(stamp, list) or [type(part) for part in stamp] != [int] * 3:
        return None
    return Kept(File(name, size, digest), (stamp[0], stamp[1], stamp[2]))


def _same_length(folder: Path, file: File) -> None:
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
            header = json.loads(file.read(min(length, size, LONGEST_HEADER)))
        wanted = (
            8 + length + max((row["data_offsets"][1] for name, row in header.items() if name[:2] != "__"), default=0)
        )
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path}: its header is not that of a safetensors file: get this file again") from error
    if size != wanted:
        raise RunError(f"{path} has {size:,} of {wanted:,} bytes: get this file again")


def _keep(folder: Path, lines: list[Kept]) -> None:
    partial = folder / f".{MANIFEST}.{os.getpid()}"
    rows = [{**asdict(line.file), "stamp": line.stamp} for line in lines]
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x") as file:
            file.write(json.dumps({"files": rows}, indent=1) + "\n")
        partial.replace(folder / MANIFEST)
    except OSError as error:
        print(f"note: {folder} takes no {MANIFEST} ({error.strerror}): its files are hashed again the next time")
