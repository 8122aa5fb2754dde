"""The command line: `ultra-patches status | explain | verify | doctor | retire`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ultra_patches.untrusted import shown, without_credentials

SCHEMA = 1


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0, 1 where a needed correction is not in force, 2 for input that means nothing.

    141 where whoever read the output has gone (`| head`), and 74 where it cannot be written.
    """
    _accept_any_text()
    try:
        code = _run(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        if error.filename is not None:  # no stream
            raise
        code = 141 if isinstance(error, BrokenPipeError) else os.EX_IOERR
        if code != 141:
            with contextlib.suppress(OSError):
                _say(f"the output cannot be written: {error.strerror or error}")
                sys.stderr.flush()
        _forget_output()
    return code


def _accept_any_text() -> None:
    """An output that takes ASCII only, or that is closed, is no reason to answer otherwise."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 # for the rest of the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _forget_output() -> None:
    # Without this Python tries once more at exit, and ends with 120.
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(nowhere.fileno(), stream.fileno())


def _say(text: str) -> None:
    print(f"ultra-patches: {shown(text)}", file=sys.stderr)


def _print_json(data: dict[str, Any]) -> None:
    print(without_credentials(json.dumps(data, indent=2)))


def _run(argv: list[str] | None) -> int:
    import ultra_patches

    parser = argparse.ArgumentParser(prog="ultra-patches", description=(ultra_patches.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"ultra-patches {ultra_patches.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="which patches are in force for what is installed")
    status.add_argument("--json", action="store_true", help="plain data, schema in docs/json.md")
    status.add_argument("--run-dir", metavar="DIR", help="of every process that wrote to ULTRA_PATCHES_RUN_DIR=DIR")
    explain = commands.add_parser("explain", help="the defect, who it hits, what is replaced, when it goes")
    explain.add_argument("id")
    verify = commands.add_parser("verify", help="run each probe without patches, with its own, and with all of them")
    verify.add_argument("ids", nargs="*", metavar="ID", help="all patches by default")
    verify.add_argument("--alone", action="store_true", help="leave out the run with all patches in force")
    verify.add_argument("--json", action="store_true", help="plain data, schema in docs/json.md")
    doctor = commands.add_parser("doctor", help="why a patch might not reach a process")
    doctor.add_argument("--json", action="store_true", help="plain data, schema in docs/json.md")
    doctor.add_argument(
        "--import", action="store_true", dest="imports", help="also import what is replaced, in fresh processes"
    )
    retire = commands.add_parser("retire", help="which patch files may be deleted, and on what evidence")
    retire.add_argument(
        "--supported", action="extend", nargs="+", default=[], metavar="SPEC", help="for instance 'vllm>=0.26'"
    )
    retire.add_argument("--json", action="store_true", help="plain data, schema in docs/json.md")
    args = parser.parse_args(argv)
    if args.command == "doctor":  # which reports an invalid setting itself
        return _doctor(args.json, args.imports)
    complaints = _complaints()
    for text in complaints:
        _say(text)
    if complaints:
        return 2
    unread = _unread()
    for text in unread:
        _say(text)
    if args.command == "status":
        return _run_dir(args.run_dir, args.json) if args.run_dir is not None else _status(args.json, unread)
    if args.command == "retire":
        return _retire(args.supported, args.json)
    wanted = [args.id] if args.command == "explain" else args.ids
    unknown = _unknown(wanted)
    if unknown:
        _say(unknown)
        return 2
    return _explain(args.id) if args.command == "explain" else _verify(args.ids, args.json, args.alone)


def _complaints() -> tuple[str, ...]:
    from ultra_patches.core import settings
    from ultra_patches.core.ledger import entries

    return settings.read(entries).complaints


def _unread() -> list[str]:
    """One line for each declaration of a patch that cannot be used."""
    from ultra_patches.core import discover

    return discover.patches()[1]


def _unknown(ids: list[str]) -> str | None:
    from ultra_patches.core.ledger import entries
    from ultra_patches.core.settings import nearest

    return next(
        (f"no patch is called {word!r} ({nearest(word, entries)})" for word in ids if word not in entries), None
    )


def _envelope(kind: str) -> dict[str, Any]:
    import platform

    import ultra_patches
    from ultra_patches.core import facts

    upstreams = [
        {
            "name": name,
            "version": found.version,
            "path": str(found.root),
            "distribution": found.distribution,
            "metadata_version": found.metadata_version,
            "conflict": found.conflict,
        }
        for name in facts.UPSTREAMS
        if (found := facts.locate(name)) is not None
    ]
    return {
        "schema": SCHEMA,
        "kind": kind,
        "ultra_patches": ultra_patches.__version__,
        "python": platform.python_version(),
        "pid": os.getpid(),
        "upstreams": upstreams,
    }


def _status(as_json: bool, unread: list[str]) -> int:
    import ultra_patches
    from ultra_patches.core.gate import BAD

    rows = ultra_patches.status()
    envelope = _envelope("status")
    conflicts = [upstream["conflict"] for upstream in envelope["upstreams"] if upstream["conflict"]]
    if as_json:
        _print_json({**envelope, "patches": [row.as_dict() for row in rows], "unread": unread})
    else:
        from ultra_patches.report import tables

        tables.status(rows, envelope["upstreams"])
        for text in conflicts:
            _say(text)
    return 1 if unread or any(row.state in BAD for row in rows) else 0


def _run_dir(folder: str, as_json: bool) -> int:
    from dataclasses import asdict

    from ultra_patches.errors import UltraPatchesError
    from ultra_patches.report import run_dir as run_report

    try:
        run = run_report.read(folder)
    except UltraPatchesError as error:
        _say(str(error))
        return 2
    problems = run_report.problems(run)
    if as_json:
        groups = {
            name: {digest: [process.file for process in processes] for digest, processes in group.items()}
            for name, group in run.groups.items()
        }
        processes = [asdict(process) for process in run.processes]
        body = {"processes": processes, "groups": groups, "problems": problems}
        _print_json({**_envelope("run-dir"), **body})
    else:
        from ultra_patches.report import tables

        tables.run_dir(run)
        for text in problems:
            _say(text)
    return 1 if problems else 0


def _explain(patch_id: str) -> int:
    from ultra_patches.core.ledger import entries
    from ultra_patches.report import tables

    tables.explain(entries[patch_id].patch)
    return 0


def _doctor(as_json: bool, imports: bool) -> int:
    from dataclasses import asdict

    from ultra_patches.report.doctor import examine

    findings = examine(imports=imports)
    envelope = _envelope("doctor")
    if as_json:
        _print_json({**envelope, "findings": [asdict(finding) for finding in findings]})
    else:
        from ultra_patches.report import tables

        tables.doctor(findings, envelope["upstreams"])
    return 1 if any(finding.severity == "problem" for finding in findings) else 0


def _retire(supported: list[str], as_json: bool) -> int:
    from ultra_patches.errors import UltraPatchesError
    from ultra_patches.report import tables
    from ultra_patches.report.retire import retire

    try:
        rows = retire(supported)
    except UltraPatchesError as error:
        _say(str(error))
        return 2
    if as_json:
        _print_json({**_envelope("retire"), "patches": [row.as_dict() for row in rows]})
    else:
        tables.retire(rows)
    return 0


def _verify(ids: list[str], as_json: bool, alone: bool) -> int:
    import functools

    from ultra_patches.core.ledger import entries
    from ultra_patches.proving.verify import FAILURES, verify
    from ultra_patches.report import tables

    patches = [entry.patch for patch_id, entry in sorted(entries.items()) if not ids or patch_id in ids]
    if as_json:
        rows = list(verify(patches, alone=alone))
        _print_json({**_envelope("verify"), "patches": [row.as_dict() for row in rows]})
    else:
        rows = tables.verify(patches, functools.partial(verify, alone=alone))
    return 1 if any(row.verdict in FAILURES for row in rows) else 0
