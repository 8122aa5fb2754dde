"""`python -m compat scan | run | pages`: the compatibility matrix."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compat import fetch, live, matrix, pages, results, scan

LOCK = Path(__file__).parent.parent / "ultra_patches" / "lock.json"


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 where something is not as recorded or a cell failed, 2 for input that means nothing."""
    parser = argparse.ArgumentParser(prog="python -m compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    scanning = commands.add_parser("scan", help="fingerprints of every target in every release")
    scanning.add_argument("--write", action="store_true", help="write ultra_patches/lock.json")
    running = commands.add_parser("run", help="each probe on a release without and with its patch")
    running.add_argument("--cell", action="append", default=[], metavar="NAME", help="for instance vllm-0.22.1")
    running.add_argument("--upstream", action="append", default=[], help="all cells of one upstream")
    running.add_argument("--again", action="store_true", help="also where a result of this patch set is kept")
    paging = commands.add_parser("pages", help="the tables made of declarations and results")
    paging.add_argument("--write", action="store_true", help="write PATCHES.md")
    args = parser.parse_args(argv)
    try:
        if args.command == "pages":
            return _pages(args.write)
        return _scan(args.write) if args.command == "scan" else _run(args.cell, args.upstream, args.again)
    except (fetch.FetchError, results.ResultError) as error:
        print(f"compat: {error}", file=sys.stderr)
        return 1


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def _scan(write: bool) -> int:
    total = sum(len(s.releases) for s in matrix.read().values())
    with _progress() as bar:
        task = bar.add_task("scan", total=total)
        found = scan.scan(lambda text: bar.update(task, advance=1, description=text))
    for failure in found.failures:
        print(f"compat: {failure}", file=sys.stderr)
    if found.failures:
        return 1
    text = scan.dump(scan.lock(found))
    if write:
        LOCK.write_text(text, encoding="utf-8")
        print(f"{LOCK.name} written")
        return 0
    current = LOCK.read_text(encoding="utf-8") if LOCK.exists() else ""
    print("lock.json is current" if text == current else "lock.json is not what the releases say: run with --write")
    return 0 if text == current else 1


def _pages(write: bool) -> int:
    text = pages.patches_md()
    if write:
        pages.PATCHES_MD.write_text(text, encoding="utf-8")
        return 0
    current = pages.PATCHES_MD.exists() and pages.PATCHES_MD.read_text(encoding="utf-8") == text
    print(f"{pages.PATCHES_MD.name} is {'current' if current else 'old: run with --write'}")
    return 0 if current else 1


def _run(names: list[str], upstreams: list[str], again: bool) -> int:
    supported = matrix.read()
    cells = [matrix.Cell(s.name, r) for s in supported.values() for r in s.releases if r not in s.not_live]
    known = {cell.name: cell for cell in cells}
    unknown = [n for n in names if n not in known] + [u for u in upstreams if u not in supported]
    if unknown:
        from ultra_patches.settings import nearest

        print(
            f"compat: no cell is called {unknown[0]!r} ({nearest(unknown[0], [*known, *supported])})", file=sys.stderr
        )
        return 2
    chosen = [c for c in cells if (not names and not upstreams) or c.name in names or c.upstream in upstreams]
    digest = results.patch_set_digest()
    todo = [c for c in chosen if again or (kept := results.load(c)) is None or kept.patch_set != digest]
    failed = 0
    with _progress() as bar, ThreadPoolExecutor(2) as pool:
        task = bar.add_task("run", total=len(todo))
        for cell, result in zip(todo, pool.map(lambda c: _one(c, supported), todo), strict=True):
            bar.update(task, advance=1, description=cell.name)
            if isinstance(result, str):
                failed += 1
                bar.console.print(f"{cell.name}: {result}")
                continue
            results.save(cell, result)
            for patch_id, row in result.patches.items():
                bar.console.print(f"{cell.name} {patch_id}: {row['verdict']} {row['note']}", highlight=False)
                failed += row["verdict"] not in results.DECIDED
    return 1 if failed else 0


def _one(cell: matrix.Cell, supported: dict[str, matrix.Supported]) -> results.Result | str:
    try:
        return live.run(cell, supported[cell.upstream])
    except fetch.FetchError as error:
        return str(error)


if __name__ == "__main__":
    raise SystemExit(main())
