"""What the scripts of these tests use inside their own process: a declaration with every field, and what was measured.

Imports nothing of the overlay at its top, so that a script decides when the overlay is imported.
"""

from __future__ import annotations

import json
from typing import Any

META = "vllm.model_executor.model_loader.reload.meta"
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def report(value: Any) -> None:
    """Hand a value to the test, as the last line of the output."""
    print("\nreport: " + json.dumps(value), flush=True)


def correct(original: Any, module: Any) -> Any:
    """A build whose function says that it is the correction."""

    def corrected(*args: Any, **kwargs: Any) -> str:
        return "corrected"

    return corrected


def inconclusive() -> Any:
    """A probe that says nothing."""
    from ultra_patches.patch import Finding, Verdict

    return Finding(Verdict.INCONCLUSIVE, "no answer")


def declare(patch_id: str, *targets: Any, **fields: Any) -> Any:
    """A Patch for one variant; a target is (module, name) or (module, name, build)."""
    from ultra_patches.patch import Patch, Target, Variant

    made = tuple(Target(*target) if len(target) == 3 else Target(*target, correct) for target in targets)
    given: dict[str, Any] = {
        "title": "A toy",
        "upstream": "vllm",
        "description": "d",
        "who": "w",
        "origin": "toy-patches",
        "bug": "b",
        "upstream_pr": "none",
        "pr_state": "none",
        "affected": ">=0.16",
        "fixed_in": None,
        "removal": "r",
        "last_checked": "2026-01-01",
        "variants": (Variant("all", made),),
        "probe": inconclusive,
    }
    return Patch(id=patch_id, **{**given, **fields})


def known(verdict: str, *patches: Any, release: str = "0.20.0") -> None:
    """Put what is on disk now into the lock: these patches were measured so on a release with these sources."""
    from ultra_patches.core import evidence, gate, lock

    before = lock.load()
    functions: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
        upstream: {key: {**digests} for key, digests in keys.items()} for upstream, keys in before.functions.items()
    }
    verdicts = {**before.verdicts}
    for patch in patches:
        sources = evidence.sources_of(patch)
        for key, digest in gate.digests(patch, gate.choose(patch, sources), sources).items():
            functions.setdefault(patch.upstream, {}).setdefault(key, {})[digest] = (release,)
        verdicts[patch.id] = {release: verdict}
    _set_lock(lock.Lock(functions, {}, verdicts))


def nothing_known() -> None:
    """An empty lock: every source is in no known release."""
    from ultra_patches.core.lock import Lock

    _set_lock(Lock({}, {}, {}))


def _set_lock(made: Any) -> None:
    from ultra_patches.core import lock

    lock.load = lambda: made  # type: ignore[assignment] # what was measured on stubs, in place of lock.json


def row(patch_id: str) -> dict[str, Any]:
    """What `status` says of one patch."""
    import ultra_patches

    return next(status.as_dict() for status in ultra_patches.status() if status.id == patch_id)
