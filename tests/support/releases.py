"""Releases for tests: fetched once, skipped with the reason where there is no network, and never skipped in CI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compat import fetch


def tree(project: str, release: str) -> Path:
    """A folder for PYTHONPATH with the sources of a release."""
    try:
        return fetch.tree(project, release)
    except fetch.FetchError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI runs on real upstreams: {error}")
        pytest.skip(str(error))
