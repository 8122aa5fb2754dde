"""Make a patch part of the key of vLLM's compile caches.

vLLM hashes its configuration and the text of the files that it traced. A function or a dtype that is changed at run time
changes neither, so that a graph which was compiled without a patch would be taken with it. Only patches that change what is
traced need this; a reload is never traced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ultra_patches import untrusted
from ultra_patches.patch import Target


def salted_by(patch_id: str) -> Target:
    """A target that adds a patch to what `VllmConfig.compute_hash` gives: hexadecimal digits, then `+id` for each patch."""

    def build(original: Callable[..., str], module: ModuleType) -> Callable[..., str]:  # noqa: ARG001 # as every build
        def compute_hash(self: Any, *args: Any, **kwargs: Any) -> str:
            digits, _, before = original(self, *args, **kwargs).partition("+")
            # Mixed in as well, because some callers keep only the first digits.
            mixed = hashlib.sha256(f"{digits} {patch_id}".encode()).hexdigest()[: len(digits)]
            return "+".join(filter(None, (mixed, before, patch_id)))

        return compute_hash

    return Target("vllm.config.vllm", "VllmConfig.compute_hash", build, optional=True, commutes=True)


def patches_of(config_hash: str) -> frozenset[str]:
    """The patches that a hash was salted with."""
    return frozenset(config_hash.split("+")[1:])


def caches(root: Path) -> Iterator[tuple[Path, frozenset[str]]]:
    """Each compile cache under vLLM's cache folder, with the patches that it was made with."""
    for path in sorted(Path(root, "torch_compile_cache").glob("*/rank_*/**/cache_key_factors.json")):
        try:
            config_hash = json.loads(untrusted.read(path))["config_hash"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(config_hash, str):
            yield root / path.relative_to(root).parents[-3], patches_of(config_hash)
