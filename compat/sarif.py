"""results.sarif: what is open in the matrix, as annotations on the lines of the patches (SARIF 2.1.0)."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from packaging.specifiers import SpecifierSet

import ultra_patches
from compat import matrix, page, results
from compat.matrix import Cell, Supported
from ultra_patches.patch import Patch

PATH = matrix.ROOT / "results.sarif"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
#: The name by which code hosts know the root of the checkout.
BASE = "%SRCROOT%"
FOLDER = "ultra_patches/patches"
#: What is open: its name, unique in the patch, the level, the field of the declaration that it is about, and the text.
Open: TypeAlias = tuple[str, str, str, str]


def sarif() -> dict[str, Any]:
    """One rule a patch, one result for each thing that somebody has to look at. Raises results.ResultError."""
    rules: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for supported in matrix.read().values():
        loaded = page.load(supported)
        for patch in matrix.patches_of(supported.name):
            seen = page.judged(patch, supported, loaded)
            rules.append(_rule(patch))
            here = (
                *_undecided(patch, supported, seen),
                *_old(supported, loaded),
                *_declared(patch, supported, seen),
                *_retired(supported, seen),
            )
            found += [_result(patch, len(rules) - 1, *each) for each in here]
    driver = {"name": "ultra-patches-compat", "version": ultra_patches.__version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": "ultra-patches/compat/"},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {BASE: {"description": {"text": "the root of the checkout"}}},
        "results": found,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def dump() -> str:
    """The text of the file."""
    return json.dumps(sarif(), indent=1, ensure_ascii=False) + "\n"


def _rule(patch: Patch) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "id": patch.id,
        "shortDescription": {"text": patch.title},
        "fullDescription": {"text": patch.description},
        "help": {"text": f"Hits {patch.who}. Upstream: {patch.pr_state}. Goes when {patch.removal}."},
        "properties": {"tags": [patch.upstream]},
    }
    links = [link for link in (patch.upstream_pr, patch.bug) if link.startswith("https://") and " " not in link]
    return {**rule, "helpUri": links[0]} if links else rule


def _undecided(patch: Patch, supported: Supported, seen: Mapping[str, page.Seen]) -> Iterator[Open]:
    """An error for each live cell that says nothing, and one for all that were never run."""
    missing = [release for release, got in seen.items() if got.state == "no-result"]
    if missing:
        which = page.spans(supported.releases, missing)
        yield "missing", "error", "PATCH", f"No result on {supported.name} {which}: run `{_again(supported, missing)}`."
    alone = [release for release, got in seen.items() if got.state == "not-run" and got.affected is None]
    if alone:
        which = page.spans(supported.releases, alone)
        text = f"No verdict on {supported.name} {which}: not run, and no release that was run has the same source."
        yield "alone", "warning", "PATCH", text
    for release, got in seen.items():
        if got.state in ("inconclusive", "failed"):
            text = f"{patch.id} on {supported.name} {release} is {got.says.rstrip('.')}."
            yield f"undecided {release}", "error", "PATCH", text


def _old(supported: Supported, loaded: page.Loaded) -> Iterator[Open]:
    """A result holds for the code that made it."""
    digest = results.patch_set_digest(supported.name)
    old = [release for release, got in loaded.items() if got is not None and got.patch_set != digest]
    if old:
        which = page.spans(supported.releases, old)
        text = f"The results on {supported.name} {which} are of other code than this: run `{_again(supported, old)}`."
        yield "old", "warning", "PATCH", text


def _again(supported: Supported, releases: list[str]) -> str:
    """What to type: it runs what has no result of this code."""
    one = f"--cell {Cell(supported.name, releases[0]).name}"
    return f"python -m compat run {one if len(releases) == 1 else f'--upstream {supported.name}'}"


def _declared(patch: Patch, supported: Supported, seen: Mapping[str, page.Seen]) -> Iterator[Open]:
    """A warning where the declaration is not what was measured."""
    known = {release: got.affected for release, got in seen.items() if got.affected is not None}
    declared = SpecifierSet(patch.affected)
    says = {release: declared.contains(release, prereleases=True) for release in known}
    order = supported.releases
    for hit, words in ((True, "affected, but not declared"), (False, "not affected, but declared")):
        wrong = [release for release, affected in known.items() if affected is hit and says[release] is not hit]
        if wrong:
            text = f"`affected` is {patch.affected}: {supported.name} {page.spans(order, wrong)} measured as {words}."
            yield f"affected {hit}", "warning", "affected", text
    last = max((order.index(release) for release, affected in known.items() if affected), default=None)
    if last is None:
        return
    after = order[last + 1] if last + 1 < len(order) else None
    if after != patch.fixed_in and (after is None or after in known):
        text = f"`fixed_in` is {patch.fixed_in}, measured is {after}: {order[last]} is the last affected release."
        yield "fixed_in", "warning", "fixed_in", text


def _retired(supported: Supported, seen: Mapping[str, page.Seen]) -> Iterator[Open]:
    """A note where no release that is still supported needs the patch."""
    rest = supported.releases[supported.releases.index(supported.lowest) :]
    if all(seen[release].affected is False for release in rest):
        text = f"{supported.name} {rest[0]} and every later release do without this patch: it can be retired."
        yield "retired", "note", "PATCH", text


def _result(patch: Patch, index: int, name: str, level: str, key: str, text: str) -> dict[str, Any]:
    path, lines = declaration(patch.id)
    place = {
        "artifactLocation": {"uri": path, "uriBaseId": BASE},
        "region": {"startLine": lines[key]},
    }
    return {
        "ruleId": patch.id,
        "ruleIndex": index,
        "level": level,
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
        # The same finding keeps its identity when its line or its words change.
        "partialFingerprints": {"ultraPatches/v1": f"{patch.id} {name}"},
    }


@functools.lru_cache
def declaration(patch_id: str) -> tuple[str, Mapping[str, int]]:
    """The file that declares a patch, from the root, and the line of each field; `PATCH` is that of the whole.

    Raises LookupError where no file in the folder declares it.
    """
    for path in sorted((matrix.ROOT.parent / FOLDER).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                fields = {word.arg: word for word in node.value.keywords if word.arg}
                named = fields["id"].value if "id" in fields else None
                if isinstance(named, ast.Constant) and named.value == patch_id:
                    lines = {name: word.lineno for name, word in fields.items()}
                    return f"{FOLDER}/{path.name}", {**lines, "PATCH": node.lineno}
    raise LookupError(f"no file in {FOLDER} declares {patch_id}: sarif takes its lines from there")
