"""Stub packages, in this process and in fresh ones, and a cache that is not the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from ultra_patches.core import hooks

from .site_dir import Site, write_module

# No deadline: a machine that also runs engines may be slow for a while, and that is no defect.
settings.register_profile("unit", max_examples=60, deadline=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the settings or the kept verdicts of whoever runs it."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("ULTRA_PATCHES", "ULTRA_PATCHES_DISABLE", "ULTRA_PATCHES_ONLY", "ULTRA_PATCHES_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Stub packages for fresh interpreters, which have what the overlay depends on and nothing else."""
    made = Site(tmp_path / "site", tmp_path / "cache")
    made.library("packaging", "rich", "pygments", "markdown_it", "mdurl")
    return made


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Write stub modules that this process can import, called `toy…`; they are forgotten afterwards."""
    root = tmp_path / "here"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))

    def write(module: str, text: str = "") -> Path:
        assert module.startswith("toy"), "so that they are found again"
        path = write_module(root, module, text)
        importlib.invalidate_caches()
        return path

    yield write
    for name in [name for name in sys.modules if name.startswith("toy")]:
        del sys.modules[name]


@pytest.fixture
def load(stub: Callable[..., Path]) -> Callable[..., ModuleType]:
    """Write a stub module and import it."""

    def write_and_import(module: str, text: str) -> ModuleType:
        stub(module, text)
        return importlib.import_module(module)

    return write_and_import


@pytest.fixture
def own_hooks() -> Iterator[None]:
    """No hooks at the start; those of whoever armed the overlay in this process come back afterwards."""
    saved = dict(hooks._watched), set(hooks._unfinished), list(sys.meta_path)
    hooks.unwatch_all()
    yield
    hooks._watched.clear()
    hooks._watched.update(saved[0])
    hooks._unfinished.clear()
    hooks._unfinished.update(saved[1])
    sys.meta_path[:] = saved[2]
