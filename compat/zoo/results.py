"""What the zoo said of each architecture: run, kept as data, and shown as a page."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from compat import fetch
from ultra_patches.core import facts

FOLDER = Path(__file__).parent / "kept"
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
#: In this order in the page.
KINDS = ("whole", "reversed", "chunks", "twice", "partial", "back")
SIDES = {"released": {"ULTRA_PATCHES": "off"}, "overlay": {}}

Row = dict[str, Any]


def run(release: str | None, wanted: Sequence[str], told: Callable[[str], None]) -> dict[str, Any]:
    """Each architecture on a release, as released and with the overlay. Raises fetch.FetchError where it cannot be had."""
    installed = facts.locate("vllm")
    release = release or str(installed.version if installed else "")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(SIDES)) as pool:
        path = (
            []
            if installed and release == installed.version
            else [str(fetch.with_operators(fetch.tree("vllm", release), Path(folder)))]
        )
        sides = pool.map(lambda side: _side(side, path, wanted, told), SIDES)
        found = dict(zip(SIDES, sides, strict=True))
    rows: dict[str, Row] = {}
    for side, lines in found.items():
        for line in lines:
            row = rows.setdefault(line["architecture"], {"kind": line["kind"]})
            for key in ("tensors", "names", "not made"):
                if key in line:
                    row[key] = line[key]
            row[side] = line.get("updates", {})
    return {
        "release": release,
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "architectures": rows,
    }


def _side(side: str, path: Sequence[str], wanted: Sequence[str], told: Callable[[str], None]) -> list[Row]:
    root = str(Path(__file__).parents[2])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ULTRA_PATCHES")}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "compat.zoo.case", *wanted],
        env={**kept, "PYTHONPATH": os.pathsep.join([*path, root]), "OMP_NUM_THREADS": "1", **SIDES[side]},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    lines: list[Row] = []
    for text in process.stdout:
        if text.startswith("{"):
            lines.append(json.loads(text))
            told(f"{side}: {lines[-1]['architecture']}")
    if process.wait():
        raise fetch.FetchError(
            f"the zoo's process ended with {process.returncode}: run `python -m compat.zoo.case` to see why"
        )
    return lines


def path_of(release: str) -> Path:
    return FOLDER / f"{release}.json"


def save(result: Mapping[str, Any]) -> Path:
    """Write a result; what was run of it before and not now stays."""
    path = path_of(result["release"])
    before = json.loads(path.read_text(encoding="utf-8"))["architectures"] if path.exists() else {}
    rows = dict(sorted({**before, **result["architectures"]}.items()))
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps({**result, "architectures": rows}, indent=1) + "\n", encoding="utf-8")
    return path


def counts(result: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """How many updates of each side were `right`, `wrong`, `raised`, `refused` or `moved`."""
    rows = result["architectures"].values()
    return {
        side: Counter(said.partition(":")[0] for row in rows for said in row.get(side, {}).values()) for side in SIDES
    }


def page() -> str:
    """`docs/zoo.md`, from all that is kept."""
    lines = [
        "# The zoo",
        "",
        "Every architecture of vLLM's registry for which transformers makes a small model, on CPU, without an engine: loaded from one",
        "checkpoint, updated to another in sessions of six kinds, and compared bit for bit with a model that was loaded from that: parameters,",
        "buffers, and every other tensor on a module. `python -m compat zoo [--release V] [ARCH…]` runs it; `--write` keeps what it found and",
        "writes this page.",
        "",
        "`refused` is an update that ended in an error which names the layer, with the old weights in it: on a CPU linear layers and experts",
        "are repacked, so that a part of one cannot be updated.",
    ]
    for path in sorted(FOLDER.glob("*.json"), reverse=True):
        lines += ["", *_release(json.loads(path.read_text(encoding="utf-8")))]
    return "\n".join(lines) + "\n"


def _release(result: Mapping[str, Any]) -> list[str]:
    made = {name: row for name, row in result["architectures"].items() if "not made" not in row}
    lines = [
        f"## vLLM {result['release']}",
        "",
        f"{result['date']}, torch {result['torch']}, transformers {result['transformers']}: {len(made)} of "
        f"{len(result['architectures'])} architectures made, {sum(len(row['overlay']) for row in made.values())} updates.",
        "",
        "| updates | right | wrong | raised | refused | moved |",
        "|---|---|---|---|---|---|",
    ]
    for side, found in counts(result).items():
        cells = " | ".join(str(found[name]) for name in ("right", "wrong", "raised", "refused", "moved"))
        lines.append(f"| {'as released' if side == 'released' else 'with the overlay'} | {cells} |")
    lines += ["", "As released / with the overlay, where one of the two is not right:", ""]
    lines += [f"| architecture | tensors | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    for name, row in made.items():
        kinds = [_cell(row, kind) for kind in KINDS]
        lines.append(f"| {name} | {row['tensors']} | {' | '.join(kinds)} |")
    lines += ["", "Not right with the overlay:", ""]
    for name, row in made.items():
        lines += [f"- {name}, {kind}: {said}" for kind, said in row["overlay"].items() if said != "right"]
    lines += ["", "Not made:", ""]
    lines += [f"- {name}: {row['not made']}" for name, row in result["architectures"].items() if "not made" in row]
    return lines


def _cell(row: Row, kind: str) -> str:
    said = [row.get(side, {}).get(kind, "-").partition(":")[0] for side in SIDES]
    return "" if said == ["right", "right"] else " / ".join(said)
