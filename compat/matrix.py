"""`matrix.toml` as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomllib

from compat import fetch
from ultra_patches.core import discover
from ultra_patches.patch import Patch

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Supported:
    """The releases of one upstream, oldest first, and which of them CI runs."""

    name: str
    releases: tuple[str, ...]
    lowest: str
    boundary: tuple[str, ...]
    latest: str
    #: Release -> why its probes cannot run on the test stack.
    not_live: Mapping[str, str]
    #: megatron-bridge release -> the megatron-core it is run with.
    core: Mapping[str, str]

    @property
    def in_ci(self) -> frozenset[str]:
        """The releases whose probes CI runs."""
        return frozenset({self.lowest, *self.boundary, self.latest})


@dataclass(frozen=True, order=True)
class Cell:
    """One release of one upstream, on which the probes run once."""

    upstream: str
    release: str

    @property
    def name(self) -> str:
        return f"{self.upstream}-{self.release}"


def read(path: Path = ROOT / "matrix.toml") -> dict[str, Supported]:
    """Every upstream by name. Raises KeyError, naming the key, for one that is missing."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: Supported(
            name,
            tuple(entry["releases"]),
            entry["lowest"],
            tuple(entry["boundary"]),
            entry["latest"],
            entry["not_live"],
            entry.get("core", {}),
        )
        for name, entry in data.items()
        if "releases" in entry
    }


def cells(supported: Mapping[str, Supported]) -> list[Cell]:
    """Every cell, oldest release first in each upstream."""
    return [Cell(entry.name, release) for entry in supported.values() for release in entry.releases]


def notes(path: Path = ROOT / "matrix.toml") -> dict[str, str]:
    """The first corrected release as the upstream's own notes name it, for each patch whose defect they name."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["notes"])


def patches_of(upstream: str) -> list[Patch]:
    """The overlay's own patches of one upstream, by id."""
    return [p for p in discover.patches()[0].values() if p.upstream == upstream and p.origin == "ultra-patches"]


def python_path(cell: Cell, supported: Supported) -> str:
    """Fetch the release of a cell and give the PYTHONPATH that puts it before what is installed. Raises fetch.FetchError."""
    trees = [fetch.tree(cell.upstream, cell.release)]
    if cell.release in supported.core:
        trees.append(fetch.tree("megatron-core", supported.core[cell.release]))
    return ":".join(map(str, [*trees, ROOT.parent]))


def file_of(module: str) -> str:
    """Where a module stands in a wheel. Packages are not needed: every target is in a leaf module."""
    return module.replace(".", "/") + ".py"
