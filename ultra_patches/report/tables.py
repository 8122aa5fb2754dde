"""What the command line shows a person. The only module that imports rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ultra_patches.core import lock
from ultra_patches.core.gate import State
from ultra_patches.core.ledger import PatchStatus
from ultra_patches.patch import Patch
from ultra_patches.proving.verify import FAILURES, Proof, Run
from ultra_patches.report import run_dir as run_report
from ultra_patches.report.doctor import Diagnosis
from ultra_patches.report.retire import Retirement
from ultra_patches.report.run_dir import RunFolder
from ultra_patches.report.spans import spans
from ultra_patches.untrusted import shown

_COLOURS = {
    "applied": "green",
    "applied-late": "green",
    "armed": "cyan",
    "drifted": "bold red",
    "conflict": "bold red",
    "failed": "bold red",
    "corrected": "green",
    "inconclusive": "yellow",
    **dict.fromkeys([*FAILURES, "problem"], "bold red"),
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line: rich would end with 1, which says that a correction is not in force."""
        raise BrokenPipeError


def _console() -> Console:
    console = _Console()
    # Where the output is not a terminal there is no width to keep to, and a cut id is of no use.
    return console if console.is_terminal else _Console(width=132)


def _cell(text: object) -> Text:
    """Plain: reasons and names come from others, and may hold what rich or a terminal would obey."""
    return Text(shown(text))


def _coloured(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, "dim"))


def status(rows: Sequence[PatchStatus], upstreams: Sequence[dict[str, Any]]) -> None:
    """The patches and their states, and which upstreams they were looked up in."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    for heading in ("patch", "installed", "state", "why"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("patch", "state"))
    for row in rows:
        installed = f"{row.upstream} {row.version or '?'}" if row.version else "-"
        late = f"{row.rebound} references rebound; " if row.state is State.APPLIED_LATE else ""
        table.add_row(_cell(row.id), _cell(installed), _coloured(row.state.value), _cell(late + row.reason))
    console.print(table)
    for upstream in upstreams:
        where = f"{upstream['name']} {upstream['version']} from {upstream['distribution']}"
        console.print(_cell(where), style="dim")


def run_dir(report: RunFolder) -> None:
    """One row for each process of a run. Not a table of rich, which takes seconds for thousands of rows."""
    rows = [run_report.HEADINGS, *(tuple(map(shown, row)) for row in run_report.table(report))]
    widths = [min(max(map(cell_len, column)), 60) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def verify(
    patches: Sequence[Patch], run: Callable[[Iterable[Patch], Callable[[str], None]], Iterator[Proof]]
) -> list[Proof]:
    """The table of `verify`, with a line that says what runs while it does."""
    console = _console()
    rows: list[Proof] = []
    with console.status("starting") as spinner:
        for row in run(patches, lambda text: spinner.update(f"{len(rows) + 1}/{len(patches)} {text}")):
            rows.append(row)
    # Without `--alone` every row has three runs, but for those of an upstream that is not installed.
    modes = ("without", "alone", "together") if any(row.together for row in rows) else ("without", "alone")
    table = Table(box=None, pad_edge=False)
    for heading in ("patch", "installed", *modes, "verdict", "seen without / note"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("patch", "verdict"))
    for row in rows:
        note = row.note or (row.without.detail if row.without else "")
        installed = f"{row.upstream} {row.version}" if row.version else "-"
        seen = [_seen(row.without, getattr(row, mode)) for mode in modes]
        table.add_row(_cell(row.id), _cell(installed), *seen, _coloured(row.verdict), _cell(note))
    console.print(table)
    return rows


def _seen(without: Run | None, run: Run | None) -> str:
    if without is None or run is None:
        return "-"
    return "gone" if (without.verdict, run.verdict) == ("defect", "clean") else run.verdict


def retire(rows: Sequence[Retirement]) -> None:
    """Which patches may go, on what evidence, and what to delete."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    for heading in ("patch", "may go", "evidence"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "patch")
    for row in rows:
        table.add_row(_cell(row.id), "yes" if row.retirable else "no", _cell(row.evidence))
    console.print(table)
    for row in filter(lambda row: row.retirable, rows):
        delete = f"{row.id}: delete {', '.join(row.files)} and the entry point {row.entry_point}"
        console.print(_cell(delete), soft_wrap=True)
        if row.tests:
            console.print(_cell(f"  look through {', '.join(row.tests)}"), soft_wrap=True, style="dim")


def doctor(findings: Sequence[Diagnosis], upstreams: Sequence[dict[str, Any]]) -> None:
    """Each finding in full, or one line where there is none."""
    console = _console()
    for finding in findings:
        # Unbroken, so that what is to be typed can be copied.
        what = Text.assemble(_coloured(finding.severity), shown(f" {finding.check}: {finding.what}"))
        console.print(what, soft_wrap=True, highlight=False)
        for heading in ("where", "means", "do"):
            line = Text.assemble((f"  {heading:6}", "dim"), shown(getattr(finding, heading)))
            console.print(line, soft_wrap=True, highlight=False)
    if not findings:
        seen = (
            ", ".join(f"{upstream['name']} {upstream['version']}" for upstream in upstreams) or "no upstream installed"
        )
        console.print(_cell(f"nothing found that keeps a patch from a process ({seen})"), soft_wrap=True)


def affected(patch: Patch) -> str:
    """The affected releases as they were measured, else as they are declared."""
    known = lock.load()
    return (
        spans(known.measured(patch.id), known.affected(patch.id)) or patch.affected or "in no release that was measured"
    )


def explain(patch: Patch) -> None:
    """One patch in full."""
    console = _console()
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    replaced = "\n".join(f"{t.module}: {t.name} ({v.name})" for v in patch.variants for t in v.targets)
    for name, value in (
        ("patch", patch.id),
        ("title", patch.title),
        ("defect", patch.description),
        ("hits", patch.who),
        ("affected", f"{patch.upstream} {affected(patch)}"),
        ("fixed in", patch.fixed_in or lock.load().fixed_in(patch.id) or "no release yet"),
        ("report", patch.bug),
        *([("to file", f"{patch.report}, in the repository of {patch.origin}")] if patch.report else []),
        ("upstream", f"{patch.upstream_pr} ({patch.pr_state})"),
        ("replaces", replaced),
        ("needs", ", ".join(patch.requires) or "nothing else"),
        ("set over", ", ".join(patch.over) or "nothing"),
        ("goes when", patch.removal),
        ("checked", patch.last_checked),
        ("from", patch.origin),
    ):
        grid.add_row(name, Text("\n".join(map(shown, value.split("\n")))))
    console.print(grid)
