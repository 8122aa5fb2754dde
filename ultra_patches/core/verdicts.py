"""Verdicts that a probe reached on sources that are in no known release, kept per user, torch, platform and Python.

The files are a convenience: where one cannot be read or written nothing is lost but the verdict. What somebody else can write is
not believed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from ultra_patches.core import facts
from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.core.gate import choose, digests
from ultra_patches.patch import Patch, Verdict


def folder() -> Path | None:
    """`$XDG_CACHE_HOME/ultra-patches/verdicts`, under `~/.cache` by default; None where neither is an absolute path."""
    # Not `Path.expanduser`, which raises where there is no HOME and the user has no passwd entry.
    home = os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    base = next(filter(os.path.isabs, (os.environ.get("XDG_CACHE_HOME", ""), home)), None)
    return Path(base, "ultra-patches", "verdicts") if base else None


def distrusted() -> str | None:
    """One line where the folder is there and others than this user can write it, so that it is not used."""
    path = folder()
    try:
        found = path.lstat() if path else None
    except (OSError, ValueError):
        return None
    if found is None:
        return None
    if not stat.S_ISDIR(found.st_mode):
        why = "is no folder"
    elif hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = "can be written by others"
    else:
        return None
    return f"{path} {why}, so that the verdicts kept there are ignored: remove it, or set XDG_CACHE_HOME to a folder of your own"


def name_of(patch: Patch, sources: Mapping[str, Fingerprint]) -> str:
    """What a verdict holds for: the patch, its sources, and what runs them."""
    seen = digests(patch, choose(patch, sources), sources)
    runs = [_torch(tuple(facts.search_path())), sys.platform, platform.machine(), sys.implementation.cache_tag]
    text = json.dumps([patch.id, patch.last_checked, sorted(seen.items()), runs])
    return f"{patch.id}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@functools.lru_cache(maxsize=8)
def _torch(path: tuple[str, ...]) -> str | None:
    return facts.torch_version()


def file_of(patch: Patch, sources: Mapping[str, Fingerprint]) -> Path | None:
    """The file of one verdict; each has its own, so that processes that verify at once do not lose each other's."""
    path = folder()
    return path / name_of(patch, sources) if path else None


def recall(patch: Patch, sources: Mapping[str, Fingerprint]) -> Verdict | None:
    """The verdict kept for exactly these sources, None without one."""
    path = file_of(patch, sources)
    if path is None or distrusted():
        return None
    try:
        # Whatever lies there by that name: no link is followed and no pipe waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            kept = file.read(64).strip()
    except (OSError, ValueError):
        return None
    return next((v for v in (Verdict.DEFECT, Verdict.CLEAN) if kept == v.value.encode()), None)


def keep(patch: Patch, sources: Mapping[str, Fingerprint], verdict: Verdict) -> str | None:
    """Remember a verdict; gives one line to print where the file cannot be written."""
    path = file_of(patch, sources)
    if path is None:
        return f"the verdict on {patch.id} cannot be kept (no home folder): set XDG_CACHE_HOME to a folder you own"
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if (why := distrusted()) is not None:
            return f"the verdict on {patch.id} is not kept: {why}"
        temporary.write_text(verdict.value, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return (
            f"the verdict on {patch.id} cannot be kept in {path.parent} ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder you own"
        )
    return None
