"""What was measured on every release: the fingerprint of each function a patch looks at, and whether the defect shows.

The data is `lock.json` beside this file, written by `python -m compat scan` and `python -m compat run`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

#: A verdict of one patch on one release.
AFFECTED, UNAFFECTED = "affected", "unaffected"


@dataclass(frozen=True)
class Lock:
    """`functions[upstream][module:name][digest]` lists releases; `verdicts[patch id][release]` is affected or unaffected.

    The digest of a function that a release does not have is the empty string.
    """

    functions: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]
    signatures: Mapping[str, Mapping[str, str]]
    verdicts: Mapping[str, Mapping[str, str]]

    def releases_with(self, upstream: str, digests: Mapping[str, str]) -> tuple[str, ...]:
        """The releases in which every `module:name` has the given digest; empty where one is unknown."""
        functions = self.functions.get(upstream, {})
        common: dict[str, None] | None = None
        for key, digest in digests.items():
            releases = functions.get(key, {}).get(digest, ())
            common = dict.fromkeys(r for r in releases if common is None or r in common)
        return tuple(common or ())

    def measured(self, patch_id: str) -> tuple[str, ...]:
        """The releases on which a patch has a verdict, oldest first."""
        from packaging.version import Version  # arming does without

        return tuple(sorted(self.verdicts.get(patch_id, {}), key=Version))

    def affected(self, patch_id: str) -> tuple[str, ...]:
        """The releases that a patch is needed on, oldest first."""
        return tuple(r for r in self.measured(patch_id) if self.verdicts[patch_id][r] == AFFECTED)

    def fixed_in(self, patch_id: str) -> str | None:
        """The first release after the last affected one, None where there is none of either."""
        measured, affected = self.measured(patch_id), self.affected(patch_id)
        after = measured[measured.index(affected[-1]) + 1 :] if affected else ()
        return next(iter(after), None)

    def signatures_of(self, upstream: str, key: str) -> frozenset[str]:
        """Every signature that a locked release gives this function."""
        known = self.signatures.get(upstream, {})
        return frozenset(known[digest] for digest in self.functions.get(upstream, {}).get(key, {}) if digest in known)


def parse(data: Mapping[str, object]) -> Lock:
    """Make a Lock of the file's JSON. Raises KeyError or TypeError where it is not of format 1."""
    if data["format"] != 1:
        raise KeyError(f"lock.json has format {data['format']!r}, this release reads 1")
    return Lock(data["functions"], data["signatures"], data["verdicts"])  # type: ignore[arg-type] # plain JSON


@functools.lru_cache(maxsize=1)
def load() -> Lock:
    """The lock that came with the package; an empty one where the file is missing, so that probes decide."""
    try:
        text = resources.files("ultra_patches.core").joinpath("lock.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return Lock({}, {}, {})
    return parse(json.loads(text))
