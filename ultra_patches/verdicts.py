"""Verdicts that `ultra-patches verify` reached on sources that are in no known release, kept per user.

The file is a convenience: where it cannot be read or written nothing is lost but the verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from ultra_patches.fingerprint import Source
from ultra_patches.gate import choose, digests
from ultra_patches.patch import Patch, Verdict


def cache_file() -> Path:
    """`$XDG_CACHE_HOME/ultra-patches/verdicts.json`, under `~/.cache` by default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache").expanduser()
    return Path(base, "ultra-patches", "verdicts.json")


def _key(patch: Patch, sources: Mapping[str, Source]) -> str:
    seen = digests(patch, choose(patch, sources), sources)
    text = json.dumps([patch.id, patch.last_checked, sorted(seen.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read() -> dict[str, str]:
    try:
        data = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def recall(patch: Patch, sources: Mapping[str, Source]) -> Verdict | None:
    """The verdict kept for exactly these sources, None without one."""
    kept = _read().get(_key(patch, sources))
    return Verdict(kept) if kept in (Verdict.DEFECT.value, Verdict.CLEAN.value) else None


def keep(patch: Patch, sources: Mapping[str, Source], verdict: Verdict) -> str | None:
    """Remember a verdict; gives one line to print where the file cannot be written."""
    path = cache_file()
    kept = {**_read(), _key(patch, sources): verdict.value}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(kept, indent=1, sort_keys=True), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return f"the verdict on {patch.id} cannot be kept in {path} ({error.strerror}): set XDG_CACHE_HOME to a folder you own"
    return None
