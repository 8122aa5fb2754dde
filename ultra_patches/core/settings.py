"""The environment variables a user sets, read into frozen data."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ultra_patches import flags

MODES = ("off", "warn", "strict")
VARIABLES = (
    "ULTRA_PATCHES",
    "ULTRA_PATCHES_DISABLE",
    "ULTRA_PATCHES_ONLY",
    "ULTRA_PATCHES_RAY_USER_HOOK",  # from `ultra_patches.entrypoints.ray` to its workers, not for users
    "ULTRA_PATCHES_RUN_DIR",
    *flags.FLAGS,
)
_FOR_USERS = tuple(name for name in VARIABLES if "RAY" not in name)


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
    given = getattr(sys, "argv", None) or [""]  # a program that embeds Python may have set none
    if given[:1] == ["-m"]:  # what Python puts there while it imports the package
        return "ultra_patches" in sys.orig_argv
    return Path(str(given[0])).stem == "ultra-patches"


def is_strict() -> bool:
    """Whether what goes wrong is an error where it happens; our own command says it and goes on."""
    return read(()).mode == "strict" and not own_command()


def nearest(word: str, known: Collection[str], count: int = 3) -> str:
    """`did you mean …` with at most `count` close words, or all that are known where none is close."""
    close = difflib.get_close_matches(word, sorted(known), n=count, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"


def _begins_like_ours(name: str) -> bool:
    """Whether a name begins as ours do, in any case, with any signs between the words and with a slip in the second."""
    bare = re.sub("[^A-Z]", "", name.upper())
    if bare.startswith("ULTRAPATCH"):
        return True
    return bare.startswith("ULTRAPA") and difflib.SequenceMatcher(None, bare[:12], "ULTRAPATCHES").ratio() > 0.9


def read(known_ids: Collection[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Read the variables of the overlay; never raises."""
    env = os.environ if environ is None else environ
    complaints = [
        f"{name} is no variable of ultra-patches ({nearest(name.upper(), _FOR_USERS, 1)})"
        for name in sorted(env)
        if name not in VARIABLES and _begins_like_ours(name)
    ]
    for name in flags.FLAGS:
        if flags.meaning(env.get(name, "")) is None:
            complaints.append(f"{name}={env[name]!r} is neither on nor off (write 1 or 0); taken as off")
    mode = env.get("ULTRA_PATCHES", "").strip().lower() or "warn"
    switch = flags.meaning(mode)
    if switch is not None:
        mode = "warn" if switch else "off"
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
