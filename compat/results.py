"""One JSON file a cell under `compat/results/`: what the probes said on one release."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compat import matrix
from compat.matrix import ROOT, Cell
from ultra_patches.patch import Patch

FOLDER = ROOT / "results"
#: Verdicts that tell whether the release needs the patch.
DECIDED = frozenset({"corrected", "not needed"})


class ResultError(Exception):
    """Why a kept result cannot be used, and what to type, in one line."""


@dataclass(frozen=True)
class Result:
    """`patches[id]` holds `without`, `alone`, `together`, `verdict` and `note` of one patch; `seal` is over everything else."""

    upstream: str
    release: str
    date: str
    python: str
    torch: str
    patch_set: str
    seconds: float
    patches: Mapping[str, Any]
    seal: str = ""

    def sealed(self) -> Result:
        """The same with its seal, which shows whether the file was edited by hand."""
        return Result(**{**asdict(self), "seal": _seal(asdict(self))})


def _seal(data: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in data.items() if k != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def path_of(cell: Cell) -> Path:
    return FOLDER / f"{cell.name}.json"


def load(cell: Cell) -> Result | None:
    """The kept result of a cell, None without one. Raises ResultError for one that is broken or was edited."""
    path = path_of(cell)
    if not path.exists():
        return None
    again = f"run `python -m compat run --cell {cell.name} --again`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        result = Result(**data)
    except (OSError, ValueError, TypeError) as error:
        raise ResultError(f"{path.name} is no result ({error}): {again}") from error
    if result.seal != _seal(data):
        raise ResultError(f"{path.name} was edited by hand (its seal does not fit): {again}")
    if (result.upstream, result.release) != (cell.upstream, cell.release):
        raise ResultError(f"{path.name} is of {result.upstream} {result.release}: {again}")
    return result


def current(cell: Cell) -> Result | None:
    """As `load`. Raises ResultError too for one that other patches or probes wrote."""
    result, patch_set = load(cell), patch_set_digest(cell.upstream)
    if result is not None and result.patch_set != patch_set:
        raise ResultError(
            f"{path_of(cell).name} was written by another patch set ({result.patch_set}, this is {patch_set}): "
            f"run `python -m compat run --cell {cell.name}`"
        )
    return result


def save(cell: Cell, result: Result) -> None:
    """Write a result whole or not at all."""
    FOLDER.mkdir(exist_ok=True)
    path = path_of(cell)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(result.sealed()), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


#: The rooms and modules of `ultra_patches` on which a result depends: the patches of an upstream, what they and their probes
#: share, and what runs the probes. How a patch is decided and set is covered by the tests, and `lock.json` is made of the
#: results.
_MEGATRON = ("patches/megatron_*.py", "patches/bridge_*.py", "bias", "lora", "stand_ins", "proving")
CODE = {
    "vllm": ("patches/vllm_*.py", "reload", "transfer", "bias", "stand_ins", "received.py", "proving"),
    "megatron-core": _MEGATRON,
    "megatron-bridge": _MEGATRON,
}


def patch_set_digest(upstream: str) -> str:
    """16 hex digits over the code that a result of an upstream depends on: a result holds for the code that made it."""
    package = ROOT.parent / "ultra_patches"
    digest = hashlib.sha256((ROOT / "live.py").read_bytes())
    for path in sorted(path for room in CODE[upstream] for path in _modules(package, room)):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def patches_beside(upstream: str) -> list[Patch]:
    """The patches that are in force together on a release of an upstream: those on whose code its result depends."""
    return [patch for name, code in CODE.items() if code == CODE[upstream] for patch in matrix.patches_of(name)]


def _modules(package: Path, room: str) -> Iterator[Path]:
    return (package / room).rglob("*.py") if (package / room).is_dir() else package.glob(room)
