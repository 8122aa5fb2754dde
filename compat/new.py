"""Releases after the last of the matrix: for each patch whether the verdict of a measured release holds there.

Nothing is installed or run. The functions are read from the wheels and compared as the gate compares what is installed.
"""

from __future__ import annotations

import ast
import difflib
import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from compat import fetch, matrix
from ultra_patches.core import fingerprint, gate, lock
from ultra_patches.patch import Patch

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

UNCHANGED, CHANGED, GONE, ADDED = "unchanged", "changed", "gone", "added"


@dataclass(frozen=True)
class Function:
    """One function that is not what it was in the last measured release: changed, gone or added.

    `signature` holds the one before and the one now where they differ, `diff` a unified diff of the source.
    """

    key: str
    state: str
    signature: tuple[str, str] | None = None
    diff: tuple[str, ...] = ()


@dataclass(frozen=True)
class Carryover:
    """One patch on one new release.

    Unchanged: `like` is the newest measured release with the same functions, `verdict` what holds there (None where it has
    none). Else `functions` says what is different, or `repeats` names an earlier new release with the same functions.
    """

    patch: str
    state: str
    like: str | None = None
    verdict: str | None = None
    functions: tuple[Function, ...] = ()
    repeats: str | None = None


@dataclass(frozen=True)
class NewRelease:
    """`failure` is one line where the release could not be read."""

    name: str
    rows: tuple[Carryover, ...] = ()
    failure: str | None = None


@dataclass(frozen=True)
class Index:
    """What the package index has: `new` releases after the matrix's last, and `unlisted` ones between its releases.

    `withdrawn` are releases of the matrix that are no longer there or were yanked.
    """

    new: tuple[str, ...]
    unlisted: tuple[str, ...]
    withdrawn: tuple[str, ...]


@dataclass(frozen=True)
class UpstreamReleases:
    name: str
    last: str
    index: Index
    releases: tuple[NewRelease, ...]


@dataclass(frozen=True)
class Comparison:
    upstreams: tuple[UpstreamReleases, ...]

    @property
    def needs_attention(self) -> bool:
        """Whether a verdict does not carry over to a new release, or a release could not be read."""
        releases = [release for upstream in self.upstreams for release in upstream.releases]
        return any(r.failure or any(row.state != UNCHANGED or row.verdict is None for row in r.rows) for r in releases)


def compare(
    supported: Mapping[str, matrix.Supported], upto: Mapping[str, str] | None = None, *, pre: bool = False
) -> Comparison:
    """Compare what the index has with the matrix. `upto` lets an upstream's matrix end at an earlier release.

    Raises fetch.FetchError where the index cannot be read; a single release that cannot be read is a failure in its place.
    """
    found = []
    for name, entry in supported.items():
        last = (upto or {}).get(name, entry.releases[-1])
        known = entry.releases[: entry.releases.index(last) + 1]
        index = split(fetch.packages(name), known, pre=pre)
        found.append(UpstreamReleases(name, last, index, _releases(name, known, index.new)))
    return Comparison(tuple(found))


def split(listed: Iterable[DistributionPackage], known: Sequence[str], *, pre: bool) -> Index:
    """Sort the releases of the index by the matrix's. A release counts as yanked when all of its files are."""
    there: dict[Version, str] = {}
    for package in listed:
        try:
            version = Version(package.version or "")
        except InvalidVersion:
            continue
        if not package.is_yanked:
            there[version] = package.version or ""
    mine = [Version(release) for release in known]
    wanted = [v for v in sorted(there) if v not in mine and (pre or not v.is_prerelease)]
    return Index(
        tuple(there[v] for v in wanted if v > mine[-1]),
        tuple(there[v] for v in wanted if mine[0] < v < mine[-1]),
        tuple(release for release in known if Version(release) not in there),
    )


def _releases(name: str, known: Sequence[str], new: Sequence[str]) -> tuple[NewRelease, ...]:
    patches = matrix.patches_of(name)
    measured = _until(lock.load(), name, known)
    keys = {key for patch in patches for key in patch.keys}
    paths = sorted({matrix.file_of(key.partition(":")[0]) for key in keys})
    # Read when the first difference turns up, which is seldom.
    before = functools.lru_cache(maxsize=1)(lambda: fetch.files(name, known[-1], paths))
    seen: dict[tuple[str, ...], str] = {}
    found = []
    with ThreadPoolExecutor(4) as pool:
        for release, texts in zip(new, pool.map(functools.partial(_read, name, paths), new), strict=True):
            if isinstance(texts, str):
                found.append(NewRelease(release, failure=texts))
                continue
            try:
                rows = [_row(patch, (name, known[-1], release), texts, before, measured, seen) for patch in patches]
                found.append(NewRelease(release, tuple(rows)))
            except fetch.FetchError as error:
                found.append(NewRelease(release, failure=str(error)))
            except SyntaxError as error:
                found.append(
                    NewRelease(release, failure=f"{name} {release} is no Python of this interpreter ({error})")
                )
    return tuple(found)


def _read(name: str, paths: list[str], release: str) -> dict[str, str | None] | str:
    try:
        return fetch.files(name, release, paths)
    except fetch.FetchError as error:
        return str(error)


def _until(measured: lock.Lock, name: str, known: Sequence[str]) -> lock.Lock:
    """The lock as it would be if the matrix ended with these releases."""
    functions = {
        key: {digest: tuple(r for r in releases if r in known) for digest, releases in digests.items()}
        for key, digests in measured.functions.get(name, {}).items()
    }
    return lock.Lock({name: functions}, measured.signatures, measured.verdicts)


def _row(
    patch: Patch,
    names: tuple[str, str, str],
    texts: Mapping[str, str | None],
    before: Callable[[], Mapping[str, str | None]],
    measured: lock.Lock,
    seen: dict[tuple[str, ...], str],
) -> Carryover:
    upstream, last, release = names
    sources = _sources(patch, texts)
    variant = gate.choose(patch, sources)
    digests = gate.digests(patch, variant, sources)
    same = measured.releases_with(upstream, digests)
    # A function that has gone is in no older release "again": it was moved or renamed, and the defect with it.
    if same and (variant is not None or last in same):
        verdicts = {measured.verdicts.get(patch.id, {}).get(r) for r in same}
        return Carryover(patch.id, UNCHANGED, same[-1], verdicts.pop() if len(verdicts) == 1 else None)
    state = CHANGED if variant else GONE
    mark = (patch.id, *(f"{key}={source.digest}" for key, source in sorted(sources.items())))
    if mark in seen:
        return Carryover(patch.id, state, repeats=seen[mark])
    titles = (f"{upstream} {last}", f"{upstream} {release}")
    old = before()
    was = _sources(patch, old)
    functions = [_function(key, (was, sources), (old, texts), titles) for key in patch.keys]
    seen[mark] = release
    return Carryover(patch.id, state, functions=tuple(f for f in functions if f is not None))


def _sources(patch: Patch, texts: Mapping[str, str | None]) -> dict[str, fingerprint.Fingerprint]:
    found = {}
    for key in patch.keys:
        module, _, name = key.partition(":")
        text = texts[matrix.file_of(module)]
        source = fingerprint.read(text, name) if text is not None else None
        if source is not None:
            found[key] = source
    return found


def _function(
    key: str,
    sources: tuple[Mapping[str, fingerprint.Fingerprint], Mapping[str, fingerprint.Fingerprint]],
    texts: tuple[Mapping[str, str | None], Mapping[str, str | None]],
    titles: tuple[str, str],
) -> Function | None:
    old, new = sources[0].get(key), sources[1].get(key)
    if (old and old.digest) == (new and new.digest):
        return None
    if new is None or old is None:
        return Function(key, GONE if new is None else ADDED)
    module, _, name = key.partition(":")
    before, after = (_lines(text[matrix.file_of(module)] or "", name) for text in texts)
    diff = difflib.unified_diff(before, after, *titles, lineterm="")
    signature = None if old.signature == new.signature else (old.signature, new.signature)
    return Function(key, CHANGED, signature, tuple(diff))


def _lines(text: str, name: str) -> list[str]:
    """A function as it stands, with its comments: they often say why it was changed."""
    function = fingerprint.find(ast.parse(text), name)
    if function is None:
        return []
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    return textwrap.dedent("\n".join(text.split("\n")[first - 1 : function.end_lineno])).split("\n")


def lines(found: Comparison) -> list[str]:
    """A comparison as text."""
    said: list[str] = []
    for upstream in found.upstreams:
        new = ", ".join(upstream.index.new) or "none"
        said.append(f"{upstream.name}: releases after {upstream.last}: {new}")
        if upstream.index.unlisted:
            said.append(f"{upstream.name}: in the index, not in the matrix: {', '.join(upstream.index.unlisted)}")
        if upstream.index.withdrawn:
            gone = ", ".join(upstream.index.withdrawn)
            said.append(f"{upstream.name}: in the matrix, but yanked or not in the index: {gone}")
        for release in upstream.releases:
            said.append(f"{upstream.name} {release.name}")
            said += [f"  {release.failure}"] if release.failure else []
            for row in release.rows:
                said += _row_lines(row, upstream.last)
    if names := [upstream.name for upstream in found.upstreams if upstream.index.new]:
        said.append(
            "next: add what is new to compat/matrix.toml, then "
            + ", ".join(f"`python -m compat run --upstream {name}`" for name in names)
            + ", `python -m compat scan --write`, `python -m compat pages --write`"
        )
    return said


def _row_lines(row: Carryover, last: str) -> list[str]:
    if row.state == UNCHANGED:
        verdict = f"so it is {row.verdict} too" if row.verdict else "which has no verdict"
        return [f"  {row.patch}: unchanged, the functions of {row.like}, {verdict}"]
    if row.repeats:
        return [f"  {row.patch}: {row.state}, as in {row.repeats}"]
    said = [f"  {row.patch}: {row.state} since {last}"]
    for function in row.functions:
        said.append(f"    {function.key} {function.state}")
        if function.signature:
            said.append(f"    called {function.signature[1]}, before {function.signature[0]}")
        said += [f"    {line}" for line in function.diff]
    return said
