"""Checkpoints of a run: `step-N` folders that are whole or absent, and the newest few of them.

A step is written beside its place and renamed when every rank has finished, so that a run which is killed leaves the one
before.
"""

import re
import shutil
from pathlib import Path

PREFIX = "step-"


def saved(out: Path) -> list[int]:
    """The steps that can be resumed from, oldest first."""
    names = [path.name.removeprefix(PREFIX) for path in (out / "checkpoints").glob(f"{PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,15}", name))


def folder(out: Path, step: int) -> Path:
    """Where the checkpoint after so many GRPO steps is."""
    return out / "checkpoints" / f"{PREFIX}{step}"


def partial(out: Path, step: int) -> Path:
    """Where it is while it is written; what a killed run left there is removed."""
    path = out / "checkpoints" / f"partial-{step}"
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def complete(out: Path, step: int, keep: int) -> None:
    """Put the written checkpoint in its place, and remove all but the newest `keep`."""
    place = folder(out, step)
    shutil.rmtree(place, ignore_errors=True)
    (out / "checkpoints" / f"partial-{step}").rename(place)
    for old in saved(out)[:-keep]:
        shutil.rmtree(folder(out, old))
