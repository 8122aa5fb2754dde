"""`python -m compat scan | run | pages | graph | zoo`: which patch each release needs, measured; the package's rooms; the zoo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compat import fetch, graph, live, matrix, new, page, pages, results, scan
from compat.zoo import results as zoo

LOCK = Path(__file__).parent.parent / "ultra_patches" / "core" / "lock.json"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    scanning = commands.add_parser("scan", help="fingerprints of every target in every release")
    scanning.add_argument("--write", action="store_true", help="write ultra_patches/core/lock.json")
    scanning.add_argument("--new", action="store_true", help="look for releases after the matrix instead")
    scanning.add_argument("--pre", action="store_true", help="with --new: pre-releases too")
    running = commands.add_parser(
        "run",
        help="each probe on a release: without patches, with its own, and with all of them",
        epilog="Without a choice, every release. A cell whose kept result is of this patch set is left out, but for --again and "
        "--check.",
    )
    running.add_argument("--cell", action="append", default=[], metavar="NAME", help="for instance vllm-0.22.1")
    running.add_argument("--upstream", action="append", default=[], help="all cells of one upstream")
    running.add_argument("--ci", action="store_true", help="the lowest, boundary and latest releases")
    running.add_argument(
        "--changed",
        action="store_true",
        help="the lowest and latest releases, and of the boundaries those whose kept result is missing or of another patch set",
    )
    running.add_argument("--again", action="store_true", help="also where a result of this patch set is kept")
    running.add_argument("--check", action="store_true", help="run again, compare with what is kept, write nothing")
    paging = commands.add_parser("pages", help="PATCHES.md and matrix.html, from declarations and results")
    paging.add_argument("--write", action="store_true", help="write them")
    drawing = commands.add_parser("graph", help="the rooms of the package: what imports what, circles, floors")
    drawing.add_argument("revision", nargs="?", metavar="REV", help="of this git revision, for instance HEAD^")
    visiting = commands.add_parser(
        "zoo", help="every architecture through updates of every kind, compared tensor by tensor"
    )
    visiting.add_argument(
        "architectures", nargs="*", metavar="ARCH", help="for instance GptOssForCausalLM; all without one"
    )
    visiting.add_argument("--release", metavar="V", help="of vLLM; what is installed without it")
    visiting.add_argument("--write", action="store_true", help="keep what was found, and write docs/zoo.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 where something is not as recorded or a cell failed, 2 for input that means nothing."""
    args = parser().parse_args(argv)
    try:
        if args.command == "graph":
            print("\n".join(graph.lines(graph.read(args.revision))))
            return 0
        if args.command == "pages":
            return _pages(args.write)
        if args.command == "run":
            return _run(args)
        if args.command == "zoo":
            return _zoo(args.release, args.architectures, args.write)
        return _new(args.pre) if args.new else _scan(args.write)
    except (fetch.FetchError, graph.GraphError, results.ResultError) as error:
        print(f"compat: {error}", file=sys.stderr)
        return 1


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True, width=None if sys.stderr.isatty() else 160))


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


def _new(pre: bool) -> int:
    found = new.compare(matrix.read(), pre=pre)
    print("\n".join(new.lines(found)))
    return 1 if found.needs_attention else 0


def _pages(write: bool) -> int:
    old = 0
    for path, text in ((pages.PATCHES_MD, pages.patches_md()), (page.PATH, page.html())):
        if write:
            path.write_text(text, encoding="utf-8")
            continue
        current = path.exists() and path.read_text(encoding="utf-8") == text
        old += not current
        print(f"{path.name} is {'current' if current else 'old: run with --write'}")
    return 1 if old else 0


def _zoo(release: str | None, wanted: list[str], write: bool) -> int:
    with _progress() as bar:
        task = bar.add_task("zoo", total=None)
        result = zoo.run(release, wanted, lambda text: bar.update(task, advance=1, description=text))
    for name, row in result["architectures"].items():
        for kind, said in row.get("overlay", {}).items():
            print(f"{name} {kind}: {row.get('released', {}).get(kind, '-')} / {said}")
        if "not made" in row:
            print(f"{name}: not made, {row['not made']}")
    found = zoo.counts(result)
    for side, count in found.items():
        print(f"{side}: {', '.join(f'{number} {name}' for name, number in count.most_common())}")
    if write:
        print(f"{zoo.save(result).name} written")
        zoo.PAGE.write_text(zoo.page(), encoding="utf-8")
    return 1 if found["overlay"]["wrong"] or found["overlay"]["moved"] else 0


def _run(args: argparse.Namespace) -> int:
    supported = matrix.read()
    known = [cell.name for cell in matrix.cells(supported)]
    unknown = [n for n in args.cell if n not in known] + [u for u in args.upstream if u not in supported]
    if unknown:
        from ultra_patches.core.settings import nearest

        hint = nearest(unknown[0], [*known, *supported])
        print(f"compat: no cell or upstream is called {unknown[0]!r} ({hint})", file=sys.stderr)
        return 2
    chosen = cells_of(args, supported)
    silent = [cell for cell in chosen if cell.release in supported[cell.upstream].not_live]
    for cell in silent:
        print(f"{cell.name}: not run, {supported[cell.upstream].not_live[cell.release]}")
    todo = [cell for cell in chosen if cell not in silent and (args.again or args.check or not _kept(cell))]
    failed = 0
    with _progress() as bar, ThreadPoolExecutor(2) as pool:
        task = bar.add_task("run", total=len(todo))
        for cell, result in zip(todo, pool.map(lambda cell: _one(cell, supported), todo), strict=True):
            bar.update(task, advance=1, description=cell.name)
            if isinstance(result, str):
                failed += 1
                bar.console.print(f"{cell.name}: {result}", highlight=False, markup=False, soft_wrap=True)
                continue
            for patch_id, row in result.patches.items():
                line = f"{cell.name} {patch_id}: {row['verdict']} {row['note']}"
                bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            failed += sum(row["verdict"] not in results.DECIDED for row in result.patches.values())
            if args.check:
                failed += _differs(cell, result)
            else:
                results.save(cell, result)
    print(f"{len(todo)} cells run, {len(silent)} not run, {failed} not as they should be")
    return 1 if failed else 0


def cells_of(args: argparse.Namespace, supported: Mapping[str, matrix.Supported]) -> list[matrix.Cell]:
    """The cells that `run` is asked for, also those that cannot run here."""
    return [cell for cell in matrix.cells(supported) if _chosen(cell, supported[cell.upstream], args)]


def _chosen(cell: matrix.Cell, supported: matrix.Supported, args: argparse.Namespace) -> bool:
    if not (args.cell or args.upstream or args.ci or args.changed):
        return True
    if cell.name in args.cell or cell.upstream in args.upstream:
        return True
    if cell.release not in supported.in_ci:
        return False
    ends = (supported.lowest, supported.latest)
    return bool(args.ci or (args.changed and (cell.release in ends or not _kept(cell))))


def _kept(cell: matrix.Cell) -> bool:
    kept = results.load(cell)
    return kept is not None and kept.patch_set == results.patch_set_digest(cell.upstream)


def _differs(cell: matrix.Cell, result: results.Result) -> bool:
    kept = results.load(cell)
    before = {k: v["verdict"] for k, v in kept.patches.items()} if kept else None
    now = {k: v["verdict"] for k, v in result.patches.items()}
    if before != now:
        print(f"compat: {cell.name} gives {now}, but {before} is kept", file=sys.stderr)
    return before != now


def _one(cell: matrix.Cell, supported: dict[str, matrix.Supported]) -> results.Result | str:
    try:
        return live.run(cell, supported[cell.upstream])
    except fetch.FetchError as error:
        return str(error)


if __name__ == "__main__":
    raise SystemExit(main())
