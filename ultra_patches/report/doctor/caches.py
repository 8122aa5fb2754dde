"""What `doctor` says of vLLM's compile caches: which were made under another set of patches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ultra_patches.bias import compile_salt
from ultra_patches.core.evidence import decisions
from ultra_patches.core.gate import Action
from ultra_patches.core.ledger import entries
from ultra_patches.core.settings import Settings
from ultra_patches.report.doctor.diagnosis import Diagnosis


def root_of(environ: Mapping[str, str]) -> Path:
    """Where vLLM keeps them: `VLLM_CACHE_ROOT`, else `vllm` in the user's cache folder."""
    # As vLLM does. `Path.expanduser` raises where there is no HOME and the user has no passwd entry.
    base = environ.get("XDG_CACHE_HOME") or Path("~", ".cache")
    return Path(os.path.expanduser(environ.get("VLLM_CACHE_ROOT") or Path(base, "vllm")))  # noqa: PTH111


def salts(chosen: Settings) -> frozenset[str]:
    """The patches that change what is traced and would be set here."""
    salted = [
        patch_id
        for patch_id, entry in entries.items()
        if any(target.name == "VllmConfig.compute_hash" for target in entry.patch.variants[0].targets)
    ]
    decided = decisions(chosen, salted)
    return frozenset(patch_id for patch_id in salted if decided[patch_id].action is not Action.NOTHING)


def check_caches(root: Path, expected: frozenset[str]) -> Iterator[Diagnosis]:
    """A cache of another patch set is not used, because the set is part of its key; it takes room and explains a recompilation."""
    others: dict[Path, frozenset[str]] = {p: made for p, made in compile_salt.caches(root) if made != expected}
    if not others:
        return
    sets = {", ".join(sorted(made)) or "no patch" for made in others.values()}
    what = f"{len(others)} compile caches made with {' or with '.join(sorted(sets))}; here it is {', '.join(sorted(expected)) or 'no patch'}"
    means = "they are not used here; one that is named by hand in compilation_config.cache_dir would be"
    do = f"rm -r {next(iter(others)) if len(others) == 1 else root / 'torch_compile_cache'} frees the space"
    yield Diagnosis("compile caches", "note", what, str(root / "torch_compile_cache"), means, do)
