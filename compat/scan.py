"""The fingerprint and signature of every target in every release, read from its files without installing it."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from compat import fetch, matrix, results
from ultra_patches.core import fingerprint
from ultra_patches.core.lock import AFFECTED, UNAFFECTED


@dataclass
class Scan:
    """What was read: the parts of lock.json that come from sources, and the releases that could not be read."""

    functions: dict[str, dict[str, dict[str, list[str]]]] = field(default_factory=dict)
    signatures: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def scan(progress: Callable[[str], None] = lambda _: None) -> Scan:
    """Read every target of every supported release."""
    found = Scan()
    for name, supported in matrix.read().items():
        keys = sorted({key for patch in matrix.patches_of(name) for key in patch.keys})
        paths = sorted({matrix.file_of(key.partition(":")[0]) for key in keys})
        with ThreadPoolExecutor(4) as pool:
            read = functools.partial(_read, name, paths)
            texts = dict(zip(supported.releases, pool.map(read, supported.releases), strict=True))
        functions: dict[str, dict[str, list[str]]] = {key: {} for key in keys}
        signatures: dict[str, str] = {}
        for release in supported.releases:
            got = texts[release]
            progress(f"{name} {release}")
            if isinstance(got, str):
                found.failures.append(got)
                continue
            for path, text in got.items():
                if text is not None:
                    digest = hashlib.sha256(text.encode()).hexdigest()
                    found.files.setdefault(name, {}).setdefault(release, {})[path] = digest
            for key in keys:
                module, _, function = key.partition(":")
                text = got[matrix.file_of(module)]
                source = fingerprint.read(text, function) if text is not None else None
                functions[key].setdefault(source.digest if source else "", []).append(release)
                if source:
                    signatures[source.digest] = source.signature
        found.functions[name] = functions
        found.signatures[name] = dict(sorted(signatures.items()))
    return found


def _read(name: str, paths: list[str], release: str) -> dict[str, str | None] | str:
    try:
        found = fetch.files(name, release, paths)
        for text in found.values():
            ast.parse(text or "")
    except fetch.FetchError as error:
        return str(error)
    except SyntaxError as error:
        return f"{name} {release} is no Python of this interpreter ({error}): fetch it again"
    return found


def lock(found: Scan) -> dict[str, Any]:
    """The content of lock.json: the scan, and for each patch and release the verdict of the kept results.

    A release that does not run on the test stack takes the verdict of one that does and has the same functions. Without
    one it has no verdict, and the gate asks the probe.
    """
    verdicts: dict[str, dict[str, str]] = {}
    for name, supported in matrix.read().items():
        cells = {release: results.current(matrix.Cell(name, release)) for release in supported.releases}
        for patch in matrix.patches_of(name):
            marks = {
                release: tuple(_digest(found, name, key, release) for key in patch.keys)
                for release in supported.releases
            }
            measured = {
                release: UNAFFECTED if cell.patches[patch.id]["without"]["verdict"] in ("clean", "absent") else AFFECTED
                for release, cell in cells.items()
                if cell is not None and cell.patches.get(patch.id, {}).get("verdict") in results.DECIDED
            }
            by_mark: dict[tuple[str, ...], set[str]] = {}
            for release, verdict in measured.items():
                by_mark.setdefault(marks[release], set()).add(verdict)
            for release in supported.releases:
                same = by_mark.get(marks[release], set())
                decided = measured.get(release) or (next(iter(same)) if len(same) == 1 else None)
                if decided is not None:
                    verdicts.setdefault(patch.id, {})[release] = decided
    return {
        "format": 1,
        "functions": found.functions,
        "signatures": found.signatures,
        "files": found.files,
        "verdicts": verdicts,
    }


def _digest(found: Scan, name: str, key: str, release: str) -> str:
    return next((d for d, releases in found.functions[name][key].items() if release in releases), "")


def dump(data: dict[str, Any]) -> str:
    """JSON that changes by the line when a release is added."""
    return json.dumps(data, indent=1, sort_keys=True) + "\n"
