"""Run probes in a process that exists for nothing else: `python -m ultra_patches.proving.process ID…`.

The upstream is imported once, with every given patch armed. Each probe then has a fork of that process to itself, in which
the patches that its own does not need are taken back, so that it shows what one patch does and leaves nothing behind.
Prints one line of JSON a probe: what it saw, how long it took, from which file the upstream came, and what had become of
the patch.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field

import ultra_patches
from ultra_patches.core import settings, verdicts
from ultra_patches.core.evidence import sources_of
from ultra_patches.core.gate import choose
from ultra_patches.core.ledger import entries
from ultra_patches.patch import Finding, Patch, Verdict

#: Seconds after which a probe is ended.
LIMIT_S = 120


@dataclass
class Imported:
    """The modules that hold a patch's targets, and what went wrong where they cannot be imported."""

    absent: bool
    seconds: float = 0.0
    files: dict[str, str | None] = field(default_factory=dict)
    failure: Finding | None = None


def main(ids: list[str]) -> int:
    for prepare in dict.fromkeys(entries[patch_id].patch.prepare for patch_id in ids):
        if prepare is not None:
            prepare()
    imported = {patch_id: _import(entries[patch_id].patch) for patch_id in ids}
    for patch_id in ids:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            try:
                _only(patch_id)
                _print(_run(entries[patch_id].patch, imported[patch_id]))
            except BaseException:  # noqa: BLE001 # the fork must not go on as if it were the parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            ended = f"signal {-code}" if code < 0 else str(code)
            why = f"no answer within {LIMIT_S} s" if code == -signal.SIGALRM else f"the process ended with {ended}"
            _print({"id": patch_id, "verdict": Verdict.INCONCLUSIVE.value, "detail": why, "state": "?", "reason": ""})
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


def _only(patch_id: str) -> None:
    """Take back every patch but one and those it needs."""
    needed = with_needs(patch_id)
    for other in reversed(list(entries)):
        if other not in needed and entries[other].applied:
            ultra_patches.revert(other)


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
        "id": patch.id,
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


def _print(result: dict[str, object]) -> None:
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
