"""The lock is read from JSON of one format, and is empty where the file is missing."""

from __future__ import annotations

import pytest

from ultra_patches.core.lock import Lock, parse

DATA = {
    "format": 1,
    "functions": {"vllm": {"m:f": {"one": ["0.18.0", "0.20.0"], "": ["0.16.0"]}, "m:g": {"two": ["0.20.0"]}}},
    "signatures": {"vllm": {"one": "(a)", "two": "()"}},
    "verdicts": {"toy": {"0.20.0": "affected"}},
}


def test_parsed() -> None:
    lock = parse(DATA)
    assert lock.releases_with("vllm", {"m:f": "one", "m:g": "two"}) == ("0.20.0",)
    assert lock.verdicts["toy"]["0.20.0"] == "affected"


@pytest.mark.parametrize("data", [{**DATA, "format": 2}, {}, {"format": 1}])
def test_another_format_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(KeyError):
        parse(data)


@pytest.mark.parametrize(
    ("upstream", "digests"),
    [("vllm", {}), ("vllm", {"m:f": "other"}), ("vllm", {"m:f": "", "m:g": "two"}), ("megatron-core", {"m:f": "one"})],
)
def test_no_release_is_like_that(upstream: str, digests: dict[str, str]) -> None:
    assert parse(DATA).releases_with(upstream, digests) == ()


def test_signatures_that_were_measured() -> None:
    lock = parse(DATA)
    assert lock.signatures_of("vllm", "m:f") == {"(a)"}
    assert lock.signatures_of("vllm", "m:h") == frozenset()


def test_an_empty_lock_knows_nothing() -> None:
    assert Lock({}, {}, {}).releases_with("vllm", {"m:f": "one"}) == ()


@pytest.mark.parametrize(
    ("letters", "affected", "fixed_in"),
    [
        ("aauu", ("0.9.0", "0.10.0rc1"), "0.10.0"),
        ("uaua", ("0.10.0rc1", "0.11.0"), None),
        ("auau", ("0.9.0", "0.10.0"), "0.11.0"),
        ("uuuu", (), None),
        ("", (), None),
    ],
)
def test_which_releases_are_affected_and_which_is_fixed(
    letters: str, affected: tuple[str, ...], fixed_in: str | None
) -> None:
    words = {"a": "affected", "u": "unaffected"}
    oldest_first = ("0.9.0", "0.10.0rc1", "0.10.0", "0.11.0")
    verdicts = {release: words[letter] for release, letter in zip(oldest_first, letters, strict=False)}
    known = Lock({}, {}, {"toy": dict(sorted(verdicts.items()))})  # as JSON holds them
    assert (known.affected("toy"), known.fixed_in("toy")) == (affected, fixed_in)
    assert known.measured("toy") == tuple(verdicts)
