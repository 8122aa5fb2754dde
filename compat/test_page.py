"""matrix.html: what it says without colour, that it needs no network, and how a browser shows it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from compat import matrix, page, results
from compat.matrix import Cell, Supported
from tests.support.kept import keep, made
from ultra_patches.patch import Patch

GUARD = next(p for p in matrix.patches_of("vllm") if p.id == "vllm-reload-numel-guard")
ALL = [(patch, supported) for name, supported in matrix.read().items() for patch in matrix.patches_of(name)]
VOID = {"meta", "br", "wbr"}


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results of the test's own."""
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


@dataclasses.dataclass
class Node:
    tag: str
    attrs: dict[str, str]
    text: str = ""
    inside: list[Node] = dataclasses.field(default_factory=list)

    def all(self, tag: str) -> list[Node]:
        return [node for child in self.inside for node in ([child] if child.tag == tag else []) + child.all(tag)]


class Tree(HTMLParser):
    """Elements of a page, all of whose tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]
        self.feed(text)
        assert self.open == [self.root], f"<{self.open[-1].tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> in <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for node in self.open:
            node.text += data


@pytest.mark.parametrize(("patch", "supported"), ALL, ids=lambda x: getattr(x, "id", ""))
def test_every_cell_says_in_words_what_its_colour_shows(patch: Patch, supported: Supported) -> None:
    tree = Tree(page.html()).root
    (table,) = [t for t in tree.all("table") if t.attrs["aria-label"] == f"{supported.name}: patches by release"]
    head, *rows = table.all("tr")
    assert [th.text.partition("core")[0] for th in head.all("th")] == ["patch", *supported.releases]
    assert {th.attrs["scope"] for th in head.all("th")} == {"col"}
    (row,) = [tr for tr in rows if tr.all("th")[0].text.strip() == patch.id]
    assert row.all("th")[0].attrs["scope"] == "row"
    (runs,) = [t for t in tree.all("table") if t.attrs["aria-label"] == f"{patch.id}: runs"]
    targets = {tr.attrs["id"]: tr for tr in runs.all("tr") if "id" in tr.attrs}
    seen = page.judged(patch, supported, page.load(supported))
    assert list(seen) == list(supported.releases)
    for (release, got), td in zip(seen.items(), row.all("td"), strict=True):
        (link,) = td.all("a")
        assert got.label in link.text
        assert link.attrs["class"] == f"cell {got.state}"
        assert link.attrs["title"].startswith(f"{patch.id} on {supported.name} {release}: ")
        assert got.label in targets[link.attrs["href"][1:]].text
        if release in supported.not_live:
            assert "not run" in link.text
            assert supported.not_live[release] in targets[link.attrs["href"][1:]].text


def test_each_patch_shows_its_source_and_links_upstream() -> None:
    tree = Tree(page.html()).root
    details = {node.attrs["id"]: node for node in tree.all("details")}
    assert list(details) == [patch.id for patch, _ in ALL]
    for patch, supported in ALL:
        shown = details[patch.id]
        if patch.bug.startswith("https://"):
            assert {patch.bug} <= {a.attrs["href"] for a in shown.all("a")}
        else:  # nobody has reported it, or nobody found where
            assert patch.bug.partition("`")[0] in " ".join(node.text for node in shown.all("dd"))
        sources, runs = shown.all("table")
        assert [tr.all("th")[0].text.split(" ")[0] for tr in sources.all("tr")[1:-1]] == [
            "".join(key.split(":")[::-1]) for key in patch.keys
        ]
        groups = [th.text for th in sources.all("tr")[0].all("th")[1:]]
        assert groups[0].startswith(supported.releases[0])
        assert groups[-1].endswith(supported.releases[-1])
        assert len(runs.all("tr")) == len(supported.releases) + 1


def test_what_the_probe_saw_is_shown_with_date_interpreter_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    patch, supported = ALL[0]
    first = supported.releases[0]
    keep(Cell(supported.name, first), {patch.id: made(patch, "corrected", "dt_bias is nan")})
    rows = {tr.attrs.get("id"): tr.text for tr in Tree(page.html()).root.all("tr")}
    assert f"defect: {patch.id} dt_bias is nan" in rows[f"{patch.id}--{first}"]
    assert "2026-01-02, Python 3.12.1, torch 2.13.0" in rows[f"{patch.id}--{first}"]


def test_words_of_a_probe_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    patch, supported = ALL[0]
    words = '<img src="https://example.invalid/x.png"> & \'"'
    keep(Cell(supported.name, supported.releases[0]), {patch.id: made(patch, "inconclusive", words)})
    text = page.html()
    assert "<img" not in text
    assert words in Tree(text).root.text


def test_page_is_self_contained() -> None:
    tree = Tree(page.html()).root
    every = [node for tag in {*re.findall(r"<([a-z0-9]+)", page.html())} for node in tree.all(tag)]
    ids = [node.attrs["id"] for node in every if "id" in node.attrs]
    assert len(ids) == len(set(ids))
    upstream = {link for patch, _ in ALL for link in (patch.bug, patch.upstream_pr)}
    for node in every:
        assert node.tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "style", "action"} & set(node.attrs)
        assert not [name for name in node.attrs if name.startswith("on")]
        target = node.attrs.get("href")
        if target is not None:
            assert node.tag == "a"
            assert target[1:] in ids if target.startswith("#") else target in upstream
    (style,) = tree.all("style")
    assert not re.search(r"url\(|@import|<", style.text)
    assert not re.search(r"https?:", style.text)


def test_page_is_the_same_in_every_process() -> None:
    code = "import sys; from compat import page; sys.stdout.buffer.write(page.html().encode())"
    env = {**os.environ, "PYTHONHASHSEED": "7", "ULTRA_PATCHES": "off"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=matrix.ROOT.parent, capture_output=True, check=True
    )
    assert done.stdout.decode() == page.html()


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_every_text_stands_out_from_its_background(mode: int) -> None:
    pair = r"light-dark\((#\w+),(#\w+)\)"
    names = {name: found[mode] for name, *found in re.findall(rf"--(\w+):{pair}", page.CSS)}
    pairs = [(names[fg], names[bg]) for fg in ("fg", "dim", "link") for bg in ("bg", "head")]
    for state in page.STATES:
        (found,) = re.findall(rf"\.{state}(?:,\.\w+)?{{color:{pair};background:{pair}", page.CSS)
        pairs.append((found[mode], found[2 + mode]))
    for one, other in pairs:
        low, high = sorted((luminance(one), luminance(other)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (one, other)


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI looks at the page in a browser: apt-get install chromium")
        pytest.skip("no chromium on PATH: apt-get install chromium")
    return found


def browse(chromium: str, tmp_path: Path, text: str, *flags: str) -> str:
    """Open a page from a file and give back its DOM. Flags may ask for a picture as well."""
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    command += [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", *flags, (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_picture_in_a_browser(chromium: str, tmp_path: Path, mode: str) -> None:
    from PIL import Image, ImageColor

    flags = ["--force-dark-mode"] if mode == "dark" else []
    browse(chromium, tmp_path, page.html(), *flags, "--window-size=1400,1000", f"--screenshot={tmp_path / 'page.png'}")
    with Image.open(tmp_path / "page.png") as opened:
        picture = opened.convert("RGB")
    assert picture.size == (1400, 1000)
    colours = {colour: count for count, colour in picture.getcolors(1 << 24) or []}
    names = {"bg": r"--bg", **{state: rf"\.{state}(?:,\.\w+)?{{color:[^;]*;background" for state in page.STATES}}
    for name, before in names.items():
        (found,) = re.findall(rf"{before}:light-dark\((#\w+),(#\w+)\)", page.CSS)
        colour = ImageColor.getrgb(found[mode == "dark"])
        assert colours.get(colour[:3], 0) > 200, f"{name} is not seen, or is in another colour"
    assert len(colours) > 50, "text has been drawn"


PROBE = """<script>
const say = (name, value) => document.body.setAttribute("data-" + name, value);
document.querySelectorAll("details").forEach(d => d.open = true);
say("overflow", document.documentElement.scrollWidth - document.documentElement.clientWidth);
const box = document.querySelector(".scroll"), first = box.querySelector("tbody th");
box.scrollLeft = 300;
say("scrolled", box.scrollLeft);
say("stuck", first.getBoundingClientRect().left - box.getBoundingClientRect().left);
const clipped = [...document.querySelectorAll(".cell")].filter(c => c.scrollWidth > c.clientWidth);
say("clipped", clipped.length);
</script>"""


@pytest.mark.parametrize("width", [1400, 500])
def test_wide_tables_scroll_in_themselves_below_a_first_column_that_stays(
    chromium: str, tmp_path: Path, width: int
) -> None:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.html()).replace(
        "</body>", PROBE + "</body>"
    )
    dom = browse(chromium, tmp_path, text, f"--window-size={width},1000", "--dump-dom")
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', dom))
    assert said == {"overflow": "0", "scrolled": "300", "stuck": "1", "clipped": "0"}


@contextlib.contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """The address of a proxy that refuses all, and the first line of each request to it."""
    asked: list[str] = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                client, _ = server.accept()
                with client:
                    client.settimeout(5)
                    with contextlib.suppress(OSError):
                        asked.append(client.recv(4096).decode(errors="replace").partition("\r\n")[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def requests(chromium: str, tmp_path: Path, text: str) -> tuple[str, list[str]]:
    """The DOM of a page and what it asked of the network, the browser's own requests left out."""
    with proxy() as (address, asked):
        flags = (f"--proxy-server={address}", "--proxy-bypass-list=<-loopback>", "--dump-dom")
        dom = browse(chromium, tmp_path, text, *flags)
    return dom, [line for line in asked if not re.search(r"[/ .](?:google|googleapis|gstatic)\.com", line)]


def test_the_tables_are_there_without_a_network_and_nothing_is_requested(chromium: str, tmp_path: Path) -> None:
    dom, asked = requests(chromium, tmp_path, page.html())
    assert asked == []
    tables = Tree(dom.partition("\n")[2].strip()).root.all("table")
    assert len(tables) == len(matrix.read()) + 2 * len(ALL)
    for patch, _ in ALL:
        assert sum(patch.id in table.text for table in tables) >= 1


def test_the_page_forbids_every_request(chromium: str, tmp_path: Path) -> None:
    picture = '<img src="http://example.invalid/x.png">'
    text = page.html().replace("</main>", picture + "</main>")
    assert requests(chromium, tmp_path, text)[1] == []
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert any("example.invalid" in line for line in requests(chromium, tmp_path, bare)[1]), "the proxy sees requests"


def test_state_of_each_kind_of_cell(empty: Path) -> None:
    patch, supported = GUARD, matrix.read()["vllm"]
    verdicts = {
        "0.16.0": "clean",
        "0.18.0": "corrected",
        "0.18.1": "absent",
        "0.19.0": "clean",
        "0.19.1": "inconclusive",
        "0.20.0": "NOT CORRECTED",
        "0.20.1": "SPOILED",
    }
    for release, verdict in verdicts.items():
        keep(Cell("vllm", release), {patch.id: made(patch, verdict)})
    seen = page.judged(patch, supported, page.load(supported))
    got = {release: (seen[release].state, seen[release].label, seen[release].affected) for release in verdicts}
    assert got == {
        "0.16.0": ("never", "never", False),
        "0.18.0": ("corrected", "corrected", True),
        "0.18.1": ("absent", "absent", False),
        "0.19.0": ("fixed", "fixed", False),
        "0.19.1": ("inconclusive", "inconclusive", None),
        "0.20.0": ("failed", "not corrected", None),
        "0.20.1": ("failed", "spoiled", None),
    }
    assert seen["0.20.0"].says == "not corrected: seen at vllm/a.py:1", "without the folders of the machine"
    assert seen["0.33.0"].state == "no-result"
    assert "`python -m compat run --cell vllm-0.33.0`" in seen["0.33.0"].says
    assert len(list(empty.iterdir())) == len(verdicts)


def test_a_release_that_was_not_run_names_the_one_whose_verdict_it_takes(empty: Path) -> None:
    patch = GUARD
    supported = dataclasses.replace(matrix.read()["vllm"], not_live={"0.17.0": "for instance"})

    def of(release: str) -> page.Seen:
        return page.judged(patch, supported, page.load(supported))[release]

    assert page.digests(patch, "0.17.0") == page.digests(patch, "0.16.0") == page.digests(patch, "0.18.0")
    assert page.digests(patch, "0.33.0") != page.digests(patch, "0.17.0")
    keep(Cell("vllm", "0.33.0"), {patch.id: made(patch, "clean")})
    assert of("0.17.0").more == "no verdict", "no release with its source was run"
    keep(Cell("vllm", "0.18.0"), {patch.id: made(patch, "corrected")})
    assert (of("0.17.0").state, of("0.17.0").more, of("0.17.0").affected) == ("not-run", "affected, as 0.18.0", True)
    assert supported.not_live["0.17.0"] in of("0.17.0").says
    keep(Cell("vllm", "0.16.0"), {patch.id: made(patch, "clean")})
    assert (of("0.17.0").more, of("0.17.0").affected) == ("no verdict", None), "those with its source differ"
    assert len(list(empty.iterdir())) == 3


def test_an_edited_result_is_refused(empty: Path) -> None:
    cell = Cell("vllm", "0.33.0")
    keep(cell, {})
    path = results.path_of(cell)
    path.write_text(path.read_text(encoding="utf-8").replace("2.13.0", "2.14.0"), encoding="utf-8")
    with pytest.raises(results.ResultError, match="edited by hand"):
        page.html()
    assert path.parent == empty


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "TypeError (/home/someone/.cache/x/releases/megatron-core-0.16.0/megatron/a.py:3)",
            "TypeError (megatron/a.py:3)",
        ),
        ("at /opt/venv/lib/python3.12/site-packages/vllm/b.py", "at vllm/b.py"),
        ("no /home/someone/work/file", "no …/file"),
        ("1/2 and/or https://github.com/a/b/pull/3", "1/2 and/or https://github.com/a/b/pull/3"),
    ],
)
def test_folders_of_the_machine_are_left_out(text: str, expected: str) -> None:
    assert page.plain(text) == expected
