"""Releases for tests: fetched once, skipped with the reason where there is no network, and never skipped in CI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compat import fetch

#: The cache of whoever runs the tests. Tests with one of their own would fetch every release again.
_CACHE = os.environ.get("XDG_CACHE_HOME", "")


def tree(project: str, release: str) -> Path:
    """A folder for PYTHONPATH with the sources of a release."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", _CACHE)
            return fetch.tree(project, release)
    except fetch.FetchError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI runs on real upstreams: {error}")
        pytest.skip(str(error))


def with_operators(release: str, folder: Path) -> Path:
    """The sources of a vLLM release with the compiled operators of the installed one beside them, for a whole engine."""
    return fetch.with_operators(tree("vllm", release), folder)
