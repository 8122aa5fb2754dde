"""A user, a password or a token of an address is in no message: of the package index, of a report, of a transfer."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat import fetch
from compat.test_new import META, Index, sdist, serving, wheel
from tests.unit.site_dir import Site
from ultra_patches.transfer.exchange import _line
from ultra_patches.untrusted import LIMIT_CHARACTERS, shown, without_credentials

SECRET = "s3cret"
USER = f"deploy:{SECRET}@"
WHEEL, SDIST = "vllm-0.22.1-py3-none-any.whl", "vllm-0.22.1.tar.gz"
OTHER_WHEEL = "vllm-0.22.1-cp39-cp39-win_arm64.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serving(tmp_path / "cache") as made:
        monkeypatch.setenv("UV_DEFAULT_INDEX", made.url.replace("://", f"://{USER}"))
        yield made


def said(release: str = "0.22.1") -> list[str]:
    """What each way to fetch a release that cannot be had says, with the traceback of a program that lets it through."""
    fetch.packages.cache_clear()
    texts = []
    for action in (lambda: fetch.tree("vllm", release), lambda: fetch.files("vllm", release, [META])):
        with pytest.raises(fetch.FetchError) as caught:
            action()
        texts.append("".join(traceback.format_exception(caught.value)))
    return texts


@pytest.mark.parametrize(
    "broken",
    ["no project", "no index", "no JSON", "other JSON", "no release", "no answer", "no scheme", "not there", "garbled",
     "garbled without ranges", "wrong hash", "yanked", "no file for this machine"],
)  # fmt: skip
def test_of_a_package_index(index: Index, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrange(index, broken)
    if broken in ("no answer", "no scheme"):
        scheme = "" if broken == "no scheme" else "http://"
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{scheme}{USER}127.0.0.1:9/simple/")
    for text in said("9.9.9" if broken == "no release" else "0.22.1"):
        assert "FetchError: " in text
        assert SECRET not in text


def arrange(index: Index, broken: str) -> None:
    if broken == "no project":
        return
    index.ranges = broken not in ("garbled without ranges", "wrong hash")
    garbled = broken.startswith("garbled")
    digest = None if garbled else "0" * 64 if broken == "wrong hash" else ""
    yanked = f"see https://{USER}host/why" if broken == "yanked" else None
    for name, content in ((WHEEL, wheel({META: ""})), (SDIST, sdist({META: ""}))):
        index.add(name, b"no archive" if garbled else content, digest=digest, yanked=yanked)
    if broken == "no file for this machine":
        del index.files[SDIST]
        index.files[OTHER_WHEEL] = index.files.pop(WHEEL)
    json = "application/vnd.pypi.simple.v1+json"
    link = f'<a href="https://{USER}127.0.0.1:9/{{0}}?token={SECRET}">{{0}}</a>'
    pages = {
        "no index": ("text/plain", b"hello"),
        "no JSON": (json, b"{"),
        "other JSON": (json, b"{}"),
        "not there": ("text/html", "".join(map(link.format, (WHEEL, SDIST))).encode()),
    }
    index.pages.update({"vllm": pages[broken]} if broken in pages else {})


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "site", tmp_path)
    made.library("packaging", "rich", "markdown_it", "mdurl", "pygments")
    made.distribution("vllm", "0.26.0")
    made.write("vllm.config.vllm")
    return made


URL = f"https://{USER}host/simple/?token={SECRET}&x=1"


@pytest.mark.parametrize("how", [["--json"], []])
@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (["retire", "--supported", f"vllm @ {URL}"], {}),
        (["doctor"], {"VLLM_PLUGINS": URL, "ULTRA_PATCHES_RUN_DIR": f"/nowhere/{URL}", "VLLM_USE_V2_MODEL_RUNNER": URL}),
        (["doctor"], {"ULTRA_PATCHES_ONLY": URL}),
        (["status"], {"ULTRA_PATCHES_ONLY": URL}),
        (["status", "--run-dir", URL], {}),
    ],
)  # fmt: skip
def test_of_a_report(site: Site, command: list[str], environment: dict[str, str], how: list[str]) -> None:
    ended = site.start("-m", "ultra_patches", *command, *how, env=environment)
    assert "Traceback" not in ended.stderr
    assert "***@host" in ended.stdout + ended.stderr, "it does speak of the address"
    assert SECRET not in ended.stdout + ended.stderr


def test_of_a_transfer() -> None:
    assert (
        _line(ConnectionError(f"500 for url: {URL}"))
        == "ConnectionError: 500 for url: https://***@host/simple/?token=***&x=1"
    )


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("http://h:80/a@b?x=1", None),
        ("mail a@b.org, see https://h/", None),
        (f"redis://:{SECRET}@h", "redis://***@h"),
        (f"'https://{SECRET}@h' and https://u:{SECRET}@x@h/y", "'https://***@h' and https://***@h/y"),
        (f"https://h/?X-Amz-Signature={SECRET}#x", "https://h/?X-Amz-Signature=***#x"),
    ],
)
def test_what_is_left_out(text: str, left: str | None) -> None:
    assert without_credentials(text) == (text if left is None else left)


@given(st.text())
def test_what_is_shown_is_one_printable_line(text: str) -> None:
    assert shown(text).isprintable()
    assert shown(shown(text)) == shown(text)


def test_what_is_shown_has_an_end() -> None:
    # Texts on which a pattern could take long.
    for part in ("a", "\x1b", "://", "@", "?token", "://@", "&key="):
        assert len(shown(part * 200_000)) < 10 * LIMIT_CHARACTERS
    assert os.sep not in shown("\n")
