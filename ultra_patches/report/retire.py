"""Which patches may go, by what was measured: every release that is still supported is unaffected.

Only `lock.json` is asked. A release without a verdict keeps a patch, and so does another patch that needs it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from ultra_patches import untrusted
from ultra_patches.core import discover
from ultra_patches.core.lock import AFFECTED, UNAFFECTED, Lock, load
from ultra_patches.core.settings import nearest
from ultra_patches.errors import UltraPatchesError
from ultra_patches.patch import Patch

_PACKAGE = "ultra_patches.patches"


@dataclass(frozen=True)
class Retirement:
    """Whether one patch may go. `releases` are the supported ones, `with_or_after` the patches that must go before it or with it.

    `tests` are files of the source checkout with the lines that name the patch: to be read, since a file may cover other
    patches too. It is empty where the package does not run from a checkout.
    """

    id: str
    upstream: str
    retirable: bool
    evidence: str
    releases: tuple[str, ...]
    with_or_after: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    entry_point: str | None = None
    tests: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Dependent:
    """A patch that does not work without another one, and why."""

    id: str
    why: str


def retire(given: Sequence[str] = ()) -> list[Retirement]:
    """Every patch of the overlay. `given` are specifiers such as `vllm>=0.26`; an upstream without one is measured whole.

    Raises UltraPatchesError for a specifier that means nothing.
    """
    lock, patches = load(), discover.patches()[0]
    modules = _modules()
    rows = decide(patches, lock, supported(given, lock), dependents(patches, modules, _sources(modules)))
    root = _checkout()
    return [_with_places(row, modules[row.id], root) for row in rows if row.id in modules]


def releases(lock: Lock) -> dict[str, tuple[str, ...]]:
    """Every release of each upstream that the lock knows, oldest first."""
    return {
        name: tuple(sorted({r for digests in keys.values() for found in digests.values() for r in found}, key=Version))
        for name, keys in lock.functions.items()
    }


def supported(given: Sequence[str], lock: Lock) -> dict[str, tuple[str, ...]]:
    """The measured releases that the specifiers contain; several for one upstream must all hold.

    Raises UltraPatchesError for one that is none, for an unknown upstream, and where no measured release is contained:
    nothing would be left to be affected, and everything could go.
    """
    known = releases(lock)
    wanted: dict[str, SpecifierSet] = {}
    for text in given:
        name, specifiers = _parse(text, known)
        wanted[name] = wanted.get(name, SpecifierSet()) & specifiers
    chosen = dict(known)
    for name, specifiers in wanted.items():
        # Without `prereleases` a release candidate that was measured would count or not by the version of packaging.
        chosen[name] = tuple(r for r in known[name] if specifiers.contains(r, prereleases=True))
        if not chosen[name]:
            span = _span(known[name])
            raise UltraPatchesError(
                f"--supported '{name}{specifiers}' contains no release that was measured ({name} {span}): "
                "name one of these, or measure it first with `python -m compat run`"
            )
    return chosen


def _parse(text: str, known: Mapping[str, Sequence[str]]) -> tuple[str, SpecifierSet]:
    try:
        requirement = Requirement(text)
    except (InvalidRequirement, InvalidSpecifier):
        requirement = None
    if requirement is None or requirement.url or requirement.marker or requirement.extras:
        raise UltraPatchesError(f"--supported {text!r} is no specifier: write for instance 'vllm>=0.26'")
    name = canonicalize_name(requirement.name)
    if name not in known:
        raise UltraPatchesError(f"--supported {text!r}: no upstream is called {name!r} ({nearest(name, known)})")
    if not requirement.specifier:
        raise UltraPatchesError(
            f"--supported {text!r} names no releases: write for instance '{name}>={known[name][-1]}'"
        )
    return name, requirement.specifier


def decide(
    patches: Mapping[str, Patch],
    lock: Lock,
    chosen: Mapping[str, tuple[str, ...]],
    needed_by: Mapping[str, Sequence[Dependent]],
) -> list[Retirement]:
    """Decide on each patch by its own verdicts, then keep those that a patch which stays depends on."""
    known = releases(lock)
    rows = {
        patch.id: _weigh(patch, lock.verdicts.get(patch.id, {}), known, chosen.get(patch.upstream, ()))
        for patch in patches.values()
    }
    # Patches that need each other go together, so those that may go are found by taking away, not by adding.
    going = {row.id for row in rows.values() if row.retirable}
    while kept := {i for i in going if any(d.id not in going for d in needed_by.get(i, ()))}:
        going -= kept
    found = []
    for row in rows.values():
        text, waits_for = row.evidence, needed_by.get(row.id, ())
        if waits_for:
            text += f"; goes only with or after {', '.join(f'{d.id} ({d.why})' for d in waits_for)}"
        if row.retirable and row.id not in going:
            text += ", which cannot go yet"
        first = tuple(dict.fromkeys(d.id for d in waits_for))
        found.append(replace(row, retirable=row.id in going, evidence=text, with_or_after=first))
    return found


def _weigh(
    patch: Patch, verdicts: Mapping[str, str], known: Mapping[str, tuple[str, ...]], looked_at: tuple[str, ...]
) -> Retirement:
    """By its own verdicts alone."""
    name, order = patch.upstream, known.get(patch.upstream, ())
    affected = tuple(r for r in looked_at if verdicts.get(r) == AFFECTED)
    unknown = tuple(r for r in looked_at if verdicts.get(r) not in (AFFECTED, UNAFFECTED))
    missing = f"no verdict for {len(unknown)} of {len(looked_at)} supported releases, {name} {_span(unknown)}"
    if not looked_at:
        evidence = f"lock.json knows no release of {name}: reinstall ultra-patches"
    elif affected:
        since = unaffected_since(verdicts, order, len(order) - 1)
        then = f"may go when support begins at {name}>={since}" if since else f"no end yet: {_state(verdicts, order)}"
        evidence = (
            f"affected in {len(affected)} of {len(looked_at)} supported releases, {name} {_span(affected)}; {then}"
            + (f"; {missing}" if unknown else "")
        )
    elif unknown:
        evidence = f"{missing}: run `python -m compat run --upstream {name}` and `python -m compat scan --write`"
    else:
        since = unaffected_since(verdicts, order, order.index(looked_at[0]))
        evidence = (
            f"unaffected in {len(looked_at)} of {len(looked_at)} supported releases, {name} {_span(looked_at)} "
            f"(lock.json); first unaffected: {since}"
        )
    return Retirement(patch.id, name, bool(looked_at) and not affected and not unknown, evidence, looked_at)


def unaffected_since(verdicts: Mapping[str, str], order: Sequence[str], last: int) -> str | None:
    """The first of the unbroken run of unaffected releases that ends at `order[last]`, None where that one is not."""
    first = None
    for release in reversed(order[: last + 1]):
        if verdicts.get(release) != UNAFFECTED:
            break
        first = release
    return first


def _state(verdicts: Mapping[str, str], order: Sequence[str]) -> str:
    return f"{order[-1]}, the newest, {'is affected' if verdicts.get(order[-1]) == AFFECTED else 'has no verdict'}"


def _span(found: Sequence[str]) -> str:
    return f"{found[0]} to {found[-1]}" if len(found) > 1 else "".join(found)


def dependents(
    patches: Mapping[str, Patch], modules: Mapping[str, str], sources: Mapping[str, str]
) -> dict[str, list[Dependent]]:
    """For each patch the ones that declare that they require it, and those whose file imports from its file."""
    found: dict[str, list[Dependent]] = {}
    for patch in patches.values():
        for other in patch.requires:
            found.setdefault(other, []).append(Dependent(patch.id, "requires it"))
    for other, module in modules.items():
        imports = re.compile(rf"^\s*(?:from|import)\s+{re.escape(_PACKAGE)}\.{module}\b", re.MULTILINE)
        for patch_id, text in sources.items():
            if patch_id != other and imports.search(text):
                found.setdefault(other, []).append(Dependent(patch_id, "imports from its file"))
    return found


def _modules() -> dict[str, str]:
    """The module of each of the overlay's own patches; those of other distributions are not ours to delete."""
    package = importlib.import_module(_PACKAGE)
    names = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")]
    return {importlib.import_module(f"{_PACKAGE}.{name}").PATCH.id: name for name in names}


def _sources(modules: Mapping[str, str]) -> dict[str, str]:
    folder = Path(__file__).parents[1] / "patches"
    return {patch_id: (folder / f"{name}.py").read_text(encoding="utf-8") for patch_id, name in modules.items()}


def _checkout() -> Path | None:
    """The root of the source checkout that the package runs from, None where it is installed."""
    root = Path(__file__).parents[2]
    try:
        ours = b'name = "ultra-patches"' in untrusted.read(root / "pyproject.toml").splitlines()
    except OSError:
        return None
    return root if ours else None


def _with_places(row: Retirement, module: str, root: Path | None) -> Retirement:
    points = [p.name for p in metadata.entry_points(group=discover.GROUP) if p.module == f"{_PACKAGE}.{module}"]
    return replace(
        row,
        files=(f"ultra_patches/patches/{module}.py",),
        entry_point=next(iter(points), None),
        tests=mentions(root, row.id, module) if root else (),
    )


def mentions(root: Path, patch_id: str, module: str) -> tuple[str, ...]:
    """Each test of a checkout that names a patch or its module, as `path:line,line`."""
    word = re.compile(rf"(?<![\w-])(?:{re.escape(patch_id)}|{re.escape(module)})(?![\w-])")
    found = []
    for path in sorted([*root.glob("tests/**/*.py"), *root.glob("compat/test_*.py")]):
        try:
            text = untrusted.read(path).decode(errors="replace")
        except OSError:  # no file of a test
            continue
        rows = [str(row) for row, line in enumerate(text.split("\n"), 1) if word.search(line)]
        if rows:
            found.append(f"{path.relative_to(root).as_posix()}:{','.join(rows)}")
    return tuple(found)
