"""matrix.html: every patch on every release, as one page that needs no network and no script."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

from compat import matrix, results
from compat.matrix import Cell, Supported
from ultra_patches.core import lock
from ultra_patches.patch import Patch
from ultra_patches.report.spans import spans

PATH = matrix.ROOT / "matrix.html"

#: Release -> its kept result, None without one.
Loaded: TypeAlias = Mapping[str, results.Result | None]

#: State of a cell -> its sign and what it means. It is written out as well: neither colour nor sign carries it alone.
STATES = {
    "corrected": ("◆", "affected: the probe shows the defect without patches, and none with its own alone or with all"),
    "fixed": ("✓", "not needed: the defect of earlier releases no longer shows"),
    "never": ("–", "not needed: neither this release nor an earlier one shows the defect"),
    "absent": ("∅", "not needed: the release has none of the functions"),
    "not-run": ("○", "does not run on the test stack: the verdict is that of the named release with the same source"),
    "no-result": ("·", "no result is kept: the release is still to be run"),
    "inconclusive": ("?", "the probe came to no verdict"),
    "failed": ("✗", "the patch does not do what it says"),
}
CSS = """
:root{color-scheme:light dark;--bg:light-dark(#fff,#14171c);--fg:light-dark(#1b1f24,#e3e7ec);
--dim:light-dark(#57606a,#9aa5b1);--line:light-dark(#d0d7de,#39414b);--head:light-dark(#f3f5f8,#1d2229);
--link:light-dark(#0550ae,#79b8ff)}
*{box-sizing:border-box}
body{margin:0;padding:1.5rem;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,"DejaVu Sans",sans-serif}
h1{margin:0 0 .5rem;font-size:1.6rem}h2{margin:1.8rem 0 .5rem;font-size:1.2rem}h3{margin:1.2rem 0 .4rem;font-size:1rem}
p,dd{max-width:95ch}p{margin:.5rem 0}a{color:var(--link)}.dim,small{color:var(--dim)}
code{font:.92em ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;max-width:100%;width:fit-content}
table{border-collapse:separate;border-spacing:0;font-size:13px}
th,td{padding:.4rem .55rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);font-weight:400}
tbody tr:last-child>*{border-bottom:0}
thead th{background:var(--head);font-weight:600;white-space:nowrap}thead small{display:block;font-weight:400}
tbody th,th:first-child{position:sticky;left:0;z-index:1;background:var(--head);border-right:1px solid var(--line)}
.matrix th{white-space:nowrap;vertical-align:middle}.matrix td{padding:2px;height:1px;min-width:5.6rem}
.matrix th+th{text-align:center}th code{overflow-wrap:normal}
.cell{display:flex;flex-direction:column;justify-content:center;min-height:100%;padding:.3rem .4rem;border-radius:4px;
text-align:center;line-height:1.25;white-space:nowrap;text-decoration:none}
.cell small{color:inherit;font-size:11px}a.cell:hover{text-decoration:underline}
.corrected{color:light-dark(#0b3a75,#d6e6ff);background:light-dark(#cfe2ff,#1d4277)}
.fixed{color:light-dark(#14532d,#c9f2d5);background:light-dark(#d3f0dc,#1c4a2e)}
.never,.absent{color:light-dark(#3f4650,#c3cad4);background:light-dark(#eceff3,#2a3038)}
.not-run{color:light-dark(#4a3b00,#f5e6b3);background:light-dark(#fff8e1,#2f2a17);border:1px dashed}
.no-result{color:light-dark(#3f4650,#c3cad4);background:light-dark(#ffffff,#14171c);border:1px dashed}
.inconclusive{color:light-dark(#5c3200,#ffe0ad);background:light-dark(#ffd89b,#6b3f05)}
.failed{color:light-dark(#7a0c18,#ffd7db);background:light-dark(#ffccd1,#7d1a26)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1rem;margin:.6rem 0}dt{color:var(--dim)}dd{margin:0}
.legend{grid-template-columns:repeat(2,max-content 1fr);gap:.3rem .8rem;max-width:82rem;font-size:13px;align-items:center}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0;padding:0 .9rem}details[open]{padding-bottom:.9rem}
summary{cursor:pointer;padding:.55rem 0}summary code{font-weight:600}summary span{display:block;margin-left:1.1rem}
:focus-visible{outline:3px solid var(--link);outline-offset:1px}tr:target>*{box-shadow:inset 0 2px var(--link),inset 0 -2px var(--link)}
.runs td{max-width:26rem}.wide{min-width:11rem}.changed{font-weight:700}
@media(max-width:60rem){body{padding:.8rem}dl,.legend{grid-template-columns:1fr}dt{width:max-content}}
@media(max-width:40rem){.matrix th:first-child{min-width:8rem;white-space:normal}}
"""


@dataclass(frozen=True)
class Seen:
    """What is known of one patch on one release: its state, the words in its cell, and those in full."""

    state: str
    label: str
    more: str
    says: str
    #: None where nothing was decided.
    affected: bool | None
    row: Mapping[str, Any] | None = None


def load(supported: Supported) -> Loaded:
    """The kept results of one upstream. Raises results.ResultError for one that cannot be used."""
    return {release: results.load(Cell(supported.name, release)) for release in supported.releases}


def judged(patch: Patch, supported: Supported, loaded: Loaded) -> dict[str, Seen]:
    """Every release of the patch's upstream, oldest first."""
    rows = {r: got.patches[patch.id] for r, got in loaded.items() if got is not None and patch.id in got.patches}
    decided = {r: row["without"]["verdict"] == "defect" for r, row in rows.items() if row["verdict"] in results.DECIDED}
    marks = {release: digests(patch, release) for release in supported.releases}
    seen: dict[str, Seen] = {}
    for release in supported.releases:
        if release in rows:
            seen[release] = _ran(rows[release], earlier=any(s.affected for s in seen.values()))
            continue
        same = [other for other in decided if marks[other] == marks[release] and None not in marks[other]]
        seen[release] = _borrowed(Cell(supported.name, release), supported, same, decided)
    return seen


def digests(patch: Patch, release: str) -> tuple[str | None, ...]:
    """The digest of each function of a patch: empty where the release has none, None where it was not scanned."""
    functions = lock.load().functions.get(patch.upstream, {})
    return tuple(
        next((digest for digest, found in functions.get(key, {}).items() if release in found), None)
        for key in patch.keys
    )


def _ran(row: Mapping[str, Any], *, earlier: bool) -> Seen:
    verdict = row["verdict"]
    if verdict not in results.DECIDED:
        state = "inconclusive" if verdict == "inconclusive" else "failed"
        return Seen(state, verdict.lower(), "", f"{verdict.lower()}: {plain(row['note'])}", None, row)
    fine = "absent" if row["without"]["verdict"] == "absent" else "fixed" if earlier else "never"
    state = "corrected" if verdict == "corrected" else fine
    return Seen(state, state, "", STATES[state][1], state == "corrected", row)


def _borrowed(cell: Cell, supported: Supported, same: Sequence[str], decided: Mapping[str, bool]) -> Seen:
    """A release without a run: the verdict of the nearest one with the same source, if those agree."""
    reason = supported.not_live.get(cell.release)
    state, label = ("not-run", "not run") if reason else ("no-result", "no result")
    head = f"{label} ({reason or f'`python -m compat run --cell {cell.name}` makes one'})"
    if len({decided[release] for release in same}) != 1:
        why = "those with the same source differ" if same else "no release that was run has the same source"
        return Seen(state, label, "no verdict", f"{head}; no verdict: {why}", None)
    at = supported.releases.index
    nearest = min(same, key=lambda release: abs(at(release) - at(cell.release)))
    more = f"{'affected' if decided[nearest] else 'not needed'}, as {nearest}"
    return Seen(state, label, more, f"{head}; {more}, which has the same source", decided[nearest])


def plain(text: str) -> str:
    """A probe's words without the folders of the machine that ran it."""
    text = re.sub(r"(?<![\w/:])/(?:[\w.+-]+/)*?(?:releases/[^/\s]+|site-packages)/", "", text)
    return re.sub(r"(?<![\w/:])/(?:[\w.+-]+/){2,}", "…/", text)


def html() -> str:
    """The whole page. The same declarations, lock and results give the same text."""
    legend = "".join(
        f'<dt><span class="cell {state}">{sign} {state.replace("-", " ")}</span></dt><dd>{meaning}</dd>\n'
        for state, (sign, meaning) in STATES.items()
    )
    tables = details = ""
    for supported in matrix.read().values():
        loaded, patches = load(supported), matrix.patches_of(supported.name)
        seen = {patch.id: judged(patch, supported, loaded) for patch in patches}
        tables += _upstream(supported, loaded, seen)
        details += "".join(_patch(patch, supported, seen[patch.id], loaded) for patch in patches)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ultra-patches: compatibility matrix</title>
<style>{CSS}</style></head>
<body>
<header><h1>Compatibility matrix of ultra-patches</h1>
<p>Each probe ran on each release without patches, with its own patch and those that it needs, and with all patches in force.
A cell shows the worse of the last two and leads to what the probe saw.</p>
<dl class="legend">
{legend}</dl></header>
<main>
{tables}<h2>The patches</h2>
{details}</main>
<footer><p class="dim">Written by <code>python -m compat pages --write</code> from <code>compat/results/</code>,
<code>compat/matrix.toml</code>, <code>ultra_patches/core/lock.json</code> and the declarations of the patches.</p></footer>
</body></html>
"""


def _words(text: str) -> str:
    """Escaped text, its `code` marked."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _dotted(name: str) -> str:
    """A qualified name that can be broken after its dots."""
    return escape(name).replace(".", ".<wbr>")


def _link(text: str) -> str:
    link = f'<a href="{escape(text)}" rel="noreferrer">{escape(text.removeprefix("https://"))}</a>'
    return link if text.startswith("https://") and " " not in text else _words(text)


def _table(name: str, kind: str, head: Iterable[str], body: str) -> str:
    """A table that scrolls in itself, also by keyboard. The headings are HTML."""
    label, cells = f'aria-label="{escape(name)}"', "".join(f'<th scope="col">{text}</th>' for text in head)
    return (
        f'<div class="scroll" role="region" {label} tabindex="0"><table class="{kind}" {label}>\n'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _release(supported: Supported, release: str) -> str:
    core = supported.core.get(release)
    return escape(release) + (f"<small>core {escape(core)}</small>" if core else "")


def _cell(seen: Seen) -> str:
    more = f"<small>{escape(seen.more)}</small>" if seen.more else ""
    return f"<span>{STATES[seen.state][0]} {escape(seen.label)}</span>{more}"


def _upstream(supported: Supported, loaded: Loaded, seen: Mapping[str, Mapping[str, Seen]]) -> str:
    ran = [result for result in loaded.values() if result is not None]
    kinds = {"": [r.date for r in ran], "Python ": [r.python for r in ran], "torch ": [r.torch for r in ran]}
    said = [word + " to ".join(sorted({min(values), max(values)})) for word, values in kinds.items() if values]
    summary = ", ".join([f"{len(ran)} of {len(supported.releases)} releases run", *said])
    body = ""
    for patch_id, row in seen.items():
        body += f'<tr><th scope="row"><a href="#{patch_id}"><code>{patch_id}</code></a></th>\n'
        for release, got in row.items():
            title = escape(f"{patch_id} on {supported.name} {release}: {got.says}")
            link = f'class="cell {got.state}" href="#{patch_id}--{escape(release)}" title="{title}"'
            body += f"<td><a {link}>{_cell(got)}</a></td>\n"
        body += "</tr>\n"
    head = ["patch", *(_release(supported, release) for release in supported.releases)]
    table = _table(f"{supported.name}: patches by release", "matrix", head, body)
    return f'<h2>{escape(supported.name)}</h2>\n<p class="dim">{escape(summary)}</p>\n{table}'


def _patch(patch: Patch, supported: Supported, seen: Mapping[str, Seen], loaded: Loaded) -> str:
    affected = spans(supported.releases, [r for r, s in seen.items() if s.affected]) or "no release"
    unknown = spans(supported.releases, [r for r, s in seen.items() if s.affected is None])
    measured = escape(f"{affected}{f'; without a verdict: {unknown}' if unknown else ''}")
    facts = {
        "defect": _words(patch.description),
        "hits": _words(patch.who),
        "affected": measured,
        "fixed in": escape(f"{lock.load().fixed_in(patch.id) or 'no release'} ({patch.pr_state})"),
        "report": _link(patch.bug),
        "upstream": _link(patch.upstream_pr),
        "needs": escape(", ".join(patch.requires) or "nothing else"),
        "goes when": _words(patch.removal),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>\n" for name, value in facts.items())
    return (
        f'<details id="{patch.id}"><summary><code>{patch.id}</code> {_words(patch.title)}'
        f'<span class="dim">{escape(patch.upstream)}: affected {measured}</span></summary>\n<dl>\n{listed}</dl>\n'
        f"<h3>Where its functions changed</h3>\n{_sources(patch, supported.releases, seen)}"
        f"<h3>What the probe saw</h3>\n{_runs(patch, supported, seen, loaded)}</details>\n"
    )


def _sources(patch: Patch, order: Sequence[str], seen: Mapping[str, Seen]) -> str:
    """One column for each run of releases with the same source, one row for each function."""
    groups = [(mark, list(run)) for mark, run in itertools.groupby(order, key=lambda release: digests(patch, release))]
    body = ""
    for i, key in enumerate(patch.keys):
        module, _, name = key.partition(":")
        note = _dotted(module) + (" (watched)" if key in patch.watches else "")
        body += f'<tr><th scope="row"><code>{_dotted(name)}</code><br><small>{note}</small></th>'
        before = groups[0][0][i]
        for mark, _ in groups:
            body += _source(mark[i], before)
            before = mark[i]
        body += "</tr>\n"
    verdicts = ("<br>".join(dict.fromkeys(escape(seen[r].label) for r in releases)) for _, releases in groups)
    body += f'<tr><th scope="row">verdict</th>{"".join(f"<td>{text}</td>" for text in verdicts)}</tr>\n'
    head = ["function", *(escape(spans(order, releases)) for _, releases in groups)]
    return _table(f"{patch.id}: sources of its functions", "sources", head, body)


def _source(digest: str | None, before: str | None) -> str:
    shown = "not scanned" if digest is None else f"<code>{escape(digest[:8])}</code>" if digest else "absent"
    if digest == before or None in (digest, before):
        return f"<td>{shown}</td>"
    return f'<td class="changed">{shown} <small>{("changed" if before else "new") if digest else "gone"}</small></td>'


def _runs(patch: Patch, supported: Supported, seen: Mapping[str, Seen], loaded: Loaded) -> str:
    """One row a release, to which the cells of the matrix lead."""
    body = ""
    for release, got in seen.items():
        result, rest = loaded[release], f'<td colspan="5">{_words(got.says)}</td>'
        if got.row is not None and result is not None:
            runs = [got.row[mode] for mode in ("without", "alone", "together")]
            said = [f"{run['verdict']}: {plain(run['detail'])}" for run in runs]
            made = f"{result.date}, Python {result.python}, torch {result.torch}, patch set {result.patch_set[:8]}"
            rest = "".join(f'<td class="wide">{escape(text)}</td>' for text in (*said, made))
            rest += f"<td>{escape(got.row['together']['state'])}</td>"
        body += (
            f'<tr id="{patch.id}--{escape(release)}"><th scope="row">{_release(supported, release)}</th>'
            f'<td><span class="cell {got.state}">{_cell(got)}</span></td>{rest}</tr>\n'
        )
    head = ("release", "verdict", "without patches", "with it alone", "with all patches in force", "run", "patch is")
    return _table(f"{patch.id}: runs", "runs", head, body)
