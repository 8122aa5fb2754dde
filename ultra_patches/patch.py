"""What a patch declares: frozen data, and two functions that touch the upstream only when they are called.

The fields follow Debian's patch tagging guidelines (DEP-3), so that each patch says where it comes from, where it was
reported and when it can go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, TypeAlias

#: Takes the upstream's function and the module that holds it, gives the function to set in its place. Upstream modules
#: are imported inside, never at the top of a patch file: reading a declaration must import no upstream and no torch.
Build: TypeAlias = Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]


class Verdict(str, Enum):
    """What a probe saw on the installed code."""

    DEFECT = "defect"
    CLEAN = "clean"
    INCONCLUSIVE = "inconclusive"
    #: The installed code has none of the functions, so the probe did not run.
    ABSENT = "absent"


@dataclass(frozen=True)
class Finding:
    """A verdict and the values it rests on, short enough for a table cell."""

    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Target:
    """One function of one upstream module, as `package.module` and `function` or `Class.method`."""

    module: str
    name: str
    build: Build = field(repr=False)
    #: Set where it is there and imported, but not waited for: the correction is in force without it.
    optional: bool = False
    #: Works the same over or under any other that says so of this function, so that no order need be declared.
    commutes: bool = False

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Variant:
    """The targets of one family of releases. The first variant whose required targets all exist is the one that is set."""

    name: str
    targets: tuple[Target, ...]

    @property
    def required(self) -> tuple[Target, ...]:
        """The targets without which the defect is not corrected."""
        return tuple(target for target in self.targets if not target.optional)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One defect of an upstream, the probe that shows it and what is set in its place."""

    id: str
    title: str
    upstream: str
    description: str
    who: str
    origin: str
    bug: str
    upstream_pr: str
    pr_state: str
    removal: str
    #: The day the verdicts of every release were last measured, as YYYY-MM-DD.
    last_checked: str
    variants: tuple[Variant, ...]
    probe: Callable[[], Finding] = field(repr=False)
    #: The affected releases as a version specifier, and the first release that carries the correction: for a patch that
    #: `lock.json` does not know. Of the overlay's own patches every release was measured, and the lock says both.
    affected: str = ""
    fixed_in: str | None = None
    #: The modules after whose import the probe can run at once. Empty where it needs process groups, other modules or
    #: seconds: then `ultra-patches verify` runs it in a fresh process.
    probe_after: tuple[str, ...] = ()
    #: Run before the upstream is imported in a process that exists for the probe alone.
    prepare: Callable[[], None] | None = field(default=None, repr=False)
    #: Patches without which this one would do harm.
    requires: tuple[str, ...] = ()
    #: Patches that this one is set over where both replace the same function.
    over: tuple[str, ...] = ()
    #: What is ready to be filed upstream, as a file in the repository; None where a public thread says it all.
    report: str | None = None
    #: Run when the patch has been taken back, so that nothing of what its functions keep is left.
    withdraw: Callable[[], None] | None = field(default=None, repr=False)
    #: Functions that are not replaced but decide whether the defect shows, as `module:name`.
    watches: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Every function whose source the verdict depends on, as `module:name`: targets of any variant, and watched ones."""
        targets = [target.key for variant in self.variants for target in variant.targets]
        return tuple(dict.fromkeys([*targets, *self.watches]))

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module to watch: those that hold a target of any variant, and those the probe waits for."""
        targets = [target.module for variant in self.variants for target in variant.targets]
        return tuple(dict.fromkeys([*targets, *self.probe_after]))
