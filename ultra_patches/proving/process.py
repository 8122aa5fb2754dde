"""Run probes in a process that exists for nothing else: `python -m ultra_patches.proving.process ID… [--beside [ID…]]`.

The upstream is imported once, with every patch armed that the environment asks for. Each run of a probe then has a fork of
that process to itself, so that it leaves nothing behind:

- `without`, the only run where ULTRA_PATCHES=off;
- `alone`: every patch is reverted but the probe's own and those that it needs;
- `together`, where `--beside` is given: these and the patches named there are in force.

Prints one line of JSON a run: what the probe saw, how long it took, from which file the upstream came, the state of the
patch, and, where the probe is clean alone but not together, the patch whose revert makes it clean.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import ultra_patches
from ultra_patches.core import settings, verdicts
from ultra_patches.core.evidence import sources_of
from ultra_patches.core.gate import choose
from ultra_patches.core.ledger import entries
from ultra_patches.patch import Finding, Patch, Verdict

#: Seconds after which a probe is ended.
LIMIT_S = 120
WITHOUT, ALONE, TOGETHER = "without", "alone", "together"


@dataclass
class Imported:
    """The modules that hold a patch's targets, and what went wrong where they cannot be imported."""

    absent: bool
    seconds: float = 0.0
    files: dict[str, str | None] = field(default_factory=dict)
    failure: Finding | None = None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ultra_patches.proving.process")
    parser.add_argument("ids", nargs="+")
    parser.add_argument("--beside", nargs="*")
    args = parser.parse_args(argv)
    for prepare in dict.fromkeys(entries[patch_id].patch.prepare for patch_id in args.ids):
        if prepare is not None:
            prepare()
    imported = {patch_id: _import(entries[patch_id].patch) for patch_id in args.ids}
    upstreams = {entries[patch_id].patch.upstream for patch_id in args.ids}
    for other in args.beside or ():
        # A patch is in force when its module is imported, which the probe need not do.
        if other not in imported and entries[other].patch.upstream in upstreams:
            _import(entries[other].patch)
    off = settings.read(entries).mode == "off"
    for patch_id in args.ids:
        own = with_needs(patch_id)
        run = functools.partial(_forked, patch_id, imported[patch_id])
        if off:
            _print(patch_id, WITHOUT, run(own))
            continue
        alone = run(own)
        _print(patch_id, ALONE, alone)
        if args.beside is not None:
            every = [*own, *args.beside]
            together = run(every)
            if _clean(alone) and not _clean(together):
                together["spoiled_by"] = _spoiler(patch_id, every, run)
            _print(patch_id, TOGETHER, together)
    return 0


def with_needs(patch_id: str) -> list[str]:
    """A patch and those it needs, in turn."""
    found = [patch_id]
    for one in found:
        needs = entries[one].patch.requires if one in entries else ()
        found += [other for other in needs if other not in found]
    return found


def _import(patch: Patch) -> Imported:
    began = time.perf_counter()
    variant = choose(patch, sources_of(patch))
    result = Imported(absent=variant is None)
    try:
        for target in variant.required if variant else ():
            module = importlib.import_module(target.module)
            result.files[target.module] = module.__file__
    except Exception as error:  # noqa: BLE001 # every way to fail is an answer here
        result.failure = _failed(error)
    result.seconds = time.perf_counter() - began
    return result


def _forked(patch_id: str, imported: Imported, in_force: Collection[str]) -> dict[str, Any]:
    """Run a probe in a fork of this process in which no other patches than these are in force."""
    sys.stdout.flush()
    # Not a pipe, which a process that the probe has started and left behind would hold open.
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            try:
                for other in reversed(list(entries)):
                    if other not in in_force and entries[other].applied:
                        ultra_patches.revert(other)
                os.write(answer.fileno(), json.dumps(_run(entries[patch_id].patch, imported)).encode())
            except BaseException:  # noqa: BLE001 # the fork must not go on as if it were the parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer.seek(0)
        if code == 0 and (text := answer.read()):
            seen: dict[str, Any] = json.loads(text)
            return seen
    ended = f"signal {-code}" if code < 0 else str(code)
    why = f"no answer within {LIMIT_S} s" if code == -signal.SIGALRM else f"the process ended with {ended}"
    return {"verdict": Verdict.INCONCLUSIVE.value, "detail": why, "state": "?", "reason": ""}


def _clean(seen: dict[str, Any]) -> bool:
    return bool(seen["verdict"] == Verdict.CLEAN.value)


def _spoiler(patch_id: str, every: Sequence[str], run: Callable[[Collection[str]], dict[str, Any]]) -> str | None:
    """The patch without which the probe is clean again, None where no single one is."""
    own = entries[patch_id].patch

    def distance(other: str) -> int:
        theirs = entries[other].applied
        if theirs.keys() & set(own.keys):
            return 0
        return 1 if {applied.target.module for applied in theirs.values()} & set(own.modules) else 2

    needed = with_needs(patch_id)
    suspects = [other for other in entries if other in every and other not in needed and entries[other].applied]
    # Those that replace one of its functions first, then those in its modules.
    for suspect in sorted(suspects, key=distance):
        if _clean(run([other for other in every if other != suspect])):
            return suspect
    return None


def _run(patch: Patch, imported: Imported) -> dict[str, object]:
    began = time.perf_counter()
    if imported.failure is not None:
        finding = imported.failure
    elif imported.absent:
        finding = Finding(Verdict.ABSENT, "the upstream has none of the functions")
    else:
        try:
            finding = patch.probe()
        except Exception as error:  # noqa: BLE001 # as above
            finding = _failed(error)
    seconds = time.perf_counter() - began
    note = None
    if finding.verdict in (Verdict.DEFECT, Verdict.CLEAN) and settings.read([patch.id]).mode == "off":
        # Where the gate knows these sources it does not ask; elsewhere this is what it waits for.
        note = verdicts.keep(patch, sources_of(patch), finding.verdict)
    row = next(row for row in ultra_patches.status() if row.id == patch.id)
    return {
        "version": row.version,
        "verdict": finding.verdict.value,
        "detail": finding.detail,
        "seconds": round(seconds, 3),
        "import_seconds": round(imported.seconds, 3),
        "files": imported.files,
        "state": row.state.value,
        "reason": row.reason,
        "note": note,
    }


def _failed(error: Exception) -> Finding:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).splitlines() or [""])[0]
    return Finding(Verdict.INCONCLUSIVE, f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})")


def _print(patch_id: str, mode: str, seen: dict[str, Any]) -> None:
    print("\n" + json.dumps({"id": patch_id, "mode": mode, **seen}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
