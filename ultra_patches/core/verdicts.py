"""Verdicts that `ultra-patches verify` reached on sources that are in no known release, kept per user.

The files are a convenience: where one cannot be read or written nothing is lost but the verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.core.gate import choose, digests
from ultra_patches.patch import Patch, Verdict


def folder() -> Path:
    """`$XDG_CACHE_HOME/ultra-patches/verdicts`, under `~/.cache` by default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache").expanduser()
    return Path(base, "ultra-patches", "verdicts")


def file_of(patch: Patch, sources: Mapping[str, Fingerprint]) -> Path:
    """The file of one verdict; each has its own, so that processes that verify at once do not lose each other's."""
    seen = digests(patch, choose(patch, sources), sources)
    text = json.dumps([patch.id, patch.last_checked, sorted(seen.items())])
    return folder() / f"{patch.id}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def recall(patch: Patch, sources: Mapping[str, Fingerprint]) -> Verdict | None:
    """The verdict kept for exactly these sources, None without one."""
    try:
        kept = file_of(patch, sources).read_bytes().strip()
    except OSError:
        return None
    return next((v for v in (Verdict.DEFECT, Verdict.CLEAN) if kept == v.value.encode()), None)


def keep(patch: Patch, sources: Mapping[str, Fingerprint], verdict: Verdict) -> str | None:
    """Remember a verdict; gives one line to print where the file cannot be written."""
    path = file_of(patch, sources)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
