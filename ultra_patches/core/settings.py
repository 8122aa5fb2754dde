"""The environment variables a user sets, read into frozen data."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

MODES = ("off", "warn", "strict")


@dataclass(frozen=True)
class Settings:
    """`mode` is off, warn or strict; `complaints` are one-line texts about values that mean nothing."""

    mode: str = "warn"
    disable: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    complaints: tuple[str, ...] = ()
    #: The folder into which each process writes its file; None where none is written.
    run_dir: str | None = None

    def excludes(self, patch_id: str) -> str | None:
        """Why the user does not want this patch, None where they do."""
        if self.mode == "off":
            return "ULTRA_PATCHES=off"
        if patch_id in self.disable:
            return "listed in ULTRA_PATCHES_DISABLE"
        if self.only is not None and patch_id not in self.only:
            return "not listed in ULTRA_PATCHES_ONLY"
        return None


def own_command() -> bool:
    """Whether this process is `ultra-patches` or `python -m ultra_patches`."""
    if sys.argv[:1] == ["-m"]:  # what Python puts there while it imports the package
        return "ultra_patches" in sys.orig_argv
    return bool(sys.argv) and Path(sys.argv[0]).stem == "ultra-patches"


def nearest(word: str, known: Collection[str]) -> str:
    """`did you mean …` with the closest known words, or all of them where none is close."""
    close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"


def read(known_ids: Collection[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Read `ULTRA_PATCHES`, `ULTRA_PATCHES_DISABLE` and `ULTRA_PATCHES_ONLY`; never raises."""
    env = os.environ if environ is None else environ
    complaints = []
    mode = env.get("ULTRA_PATCHES", "").strip().lower() or "warn"
    if mode not in MODES:
        complaints.append(f"ULTRA_PATCHES={mode!r} is not off, warn or strict ({nearest(mode, MODES)}); using warn")
        mode = "warn"
    lists: dict[str, frozenset[str]] = {}
    for variable in ("ULTRA_PATCHES_DISABLE", "ULTRA_PATCHES_ONLY"):
        ids = frozenset(part.strip() for part in env.get(variable, "").split(",") if part.strip())
        complaints += [
            f"{variable}: no patch is called {word!r} ({nearest(word, known_ids)})"
            for word in sorted(ids - set(known_ids))
        ]
        lists[variable] = ids
    run_dir = env.get("ULTRA_PATCHES_RUN_DIR", "").strip() or None
    if run_dir and not Path(run_dir).is_absolute():
        complaints.append(f"ULTRA_PATCHES_RUN_DIR={run_dir!r} is not absolute: a process elsewhere writes elsewhere")
    only = lists["ULTRA_PATCHES_ONLY"] or None
    return Settings(mode, lists["ULTRA_PATCHES_DISABLE"], only, tuple(complaints), run_dir)
