"""What `doctor` looks at: metadata on the path, copies of an upstream, rewritten files, and the functions of a process.

Run as `python -m ultra_patches.report.doctor.facts UPSTREAM` it imports what the needed patches replace, in a process that
exists for nothing else, and prints what became of them as one line of JSON. Imports no upstream otherwise, and no torch.
"""

from __future__ import annotations

import base64
import csv
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from ultra_patches.core import apply, facts, hooks, overlay, settings
from ultra_patches.core.evidence import decisions, sources_of
from ultra_patches.core.gate import BAD, Action, State, choose
from ultra_patches.core.ledger import PatchStatus, entries

Point = tuple[str, str, str]


@dataclass(frozen=True)
class Installed:
    """The metadata of one distribution: its dist-info or egg-info, and the folder its packages are imported from."""

    name: str
    version: str | None
    path: Path
    home: Path
    points: frozenset[Point] = frozenset()

    def __str__(self) -> str:
        return f"{self.name} {self.version or 'of unknown version'} ({self.path})"


@dataclass(frozen=True)
class ProcessState:
    """What became of the patches in one process. `failed` has a text for each module that cannot be imported there."""

    rows: tuple[PatchStatus, ...]
    #: Patches whose modules have all been imported without our hook being called.
    unfired: tuple[str, ...] = ()
    #: Targets that someone else has replaced, and that no patch of ours is to replace here.
    foreign: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


def installed(*names: str) -> tuple[Installed, ...]:
    """The distributions of these names in the order of the path: of one name, the first hides the others."""
    found: dict[Path, Installed] = {}
    for name in names:
        for distribution in metadata.distributions(name=name):
            path = Path(str(getattr(distribution, "_path", distribution.locate_file(""))))
            points = _points(distribution)
            version = facts.field_of(distribution, "Version")
            # The path may hold one folder twice, or a link to it.
            found.setdefault(path.resolve(), Installed(name, version, path, _home(distribution), points))
    return tuple(found.values())


def _home(distribution: metadata.Distribution) -> Path:
    """An editable distribution's packages lie in its source tree, not beside its metadata."""
    try:
        given = json.loads(distribution.read_text("direct_url.json") or "{}")
        if given.get("dir_info", {}).get("editable"):
            home = Path(unquote(urlsplit(given["url"]).path))
            home.resolve()  # raises ValueError for a null character
            return home
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError, OSError):
        pass
    return Path(str(distribution.locate_file("")))


def entry_points() -> frozenset[Point]:
    """Every entry point that others find, which are those of the first distribution of each name."""
    # Not `metadata.entry_points`, which ends with the first distribution that cannot be read.
    first: dict[str, frozenset[Point]] = {}
    for distribution in metadata.distributions():
        try:
            first.setdefault(canonicalize_name(distribution.metadata["Name"]), _points(distribution))
        except Exception:  # noqa: BLE001, S112 # it has no name by which another could hide it, and none of ours is like that
            continue
    return frozenset().union(*first.values())


def _points(distribution: metadata.Distribution) -> frozenset[Point]:
    try:
        return frozenset((p.group, p.name, p.value) for p in distribution.entry_points)
    except Exception:  # noqa: BLE001 # metadata may be anything, and so may what reading it raises
        return frozenset()


def copies(upstream: facts.Upstream) -> tuple[Path, ...]:
    """The same package in other folders of the path, which the imported one shadows."""
    parts = upstream.package.split(".")
    roots = [Path(folder or ".", *parts) for folder in sys.path]
    # Not is_file(), which raises where a folder of the path may not be read.
    found = {root.resolve(): root for root in roots if os.path.isfile(root / "__init__.py")}  # noqa: PTH113
    return tuple(root for real, root in found.items() if real != upstream.root.resolve())


def rewritten(upstream: facts.Upstream) -> dict[Path, list[str]]:
    """The files that hold functions of ours and are not as the RECORD beside them says, with these functions."""
    top = upstream.root.parents[upstream.package.count(".")]
    beside = (
        d
        for d in metadata.distributions(name=upstream.distribution or upstream.name)
        if Path(str(d.locate_file(""))).resolve() == top.resolve()
    )
    # Not `distribution.files`, which stats each of thousands.
    try:
        distribution = next(beside, None)
        lines = csv.reader(((distribution.read_text("RECORD") if distribution else "") or "").splitlines())
        recorded = {
            line[0]: line[1].removeprefix("sha256=") for line in lines if line[1:] and line[1].startswith("sha256=")
        }
    except (csv.Error, ValueError, OSError):  # such a RECORD says nothing
        return {}
    changed: dict[Path, list[str]] = {}
    for key in dict.fromkeys(k for e in entries.values() if e.patch.upstream == upstream.name for k in e.patch.keys):
        module, _, name = key.partition(":")
        path = upstream.path_of(module)
        expected = recorded.get(path.relative_to(top).as_posix()) if path else None
        if path and expected and expected != _record_digest(path):
            changed.setdefault(path, []).append(name)
    return changed


def _record_digest(path: Path) -> str:
    digest = base64.urlsafe_b64encode(bytes.fromhex(facts.file_digest(path)))
    return digest.rstrip(b"=").decode()


def refused(folder: str) -> tuple[bool, str | None]:
    """Whether a folder exists, and why no file can be made in it (or in the first folder above it that exists); None where one can."""
    try:
        path = Path(folder)
        there = path.exists()
        while not path.exists():
            path = path.parent
        # By trying: the mode bits say little about a network file system.
        with tempfile.TemporaryFile(dir=path):
            return there, None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        return False, (error.strerror if isinstance(error, OSError) else None) or str(error)


def process() -> ProcessState:
    """What became of the patches in this process, and who else has set what they would replace."""
    rows = tuple(overlay.status())
    decided = decisions(settings.read(entries), [row.id for row in rows if row.state is State.ARMED])
    unfired = []
    for row in rows:
        decision = decided[row.id] if row.state is State.ARMED else None
        after = entries[row.id].patch.probe_after if decision and decision.action is Action.PROBE else ()
        targets = decision.variant.required if decision and decision.variant else ()
        modules = [*(target.module for target in targets), *after]
        if decision and modules and all(hooks.ready(name, "") for name in modules):
            unfired.append(row.id)
    told = {key for row in rows if row.state in BAD for key in row.targets}
    foreign = dict.fromkeys(text for row in rows for text in _foreign(row, told))
    return ProcessState(rows, tuple(unfired), tuple(foreign))


def _foreign(row: PatchStatus, told: Collection[str]) -> list[str]:
    """What someone else has set in place of the targets of a patch that is not to be set; `told` are targets whose state says it."""
    if row.state in (State.APPLIED, State.APPLIED_LATE) or row.state in BAD:
        return []
    patch = entries[row.id].patch
    sources = sources_of(patch)
    variant = choose(patch, sources)
    said = []
    for target in variant.targets if variant else ():
        if target.key in told or target.key not in sources or not hooks.ready(target.module, ""):
            continue
        module = sys.modules[target.module]
        try:
            place = apply.resolve(module, target.name)
            if apply.owner_of(place.function) is None:
                apply.check_pristine(module, target.name, place, sources[target.key].decorated)
        except (apply.ForeignCodeError, AttributeError, KeyError) as error:
            said.append(str(error))
    return said


def fresh_process(upstream: str, timeout: float = 300) -> ProcessState:
    """The same for a fresh interpreter that has imported the targets of the patches that an upstream needs."""
    mode = "off" if settings.read(entries).mode == "off" else "warn"  # strict would end the process before it prints
    env = {**os.environ, "ULTRA_PATCHES": mode}
    env.pop("ULTRA_PATCHES_RUN_DIR", None)  # it is no process of the run
    command = [sys.executable, "-W", "ignore", "-m", "ultra_patches.report.doctor.facts", upstream]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        data = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return ProcessState((), failed={upstream: f"no answer within {timeout:.0f} s"})
    except (IndexError, ValueError):
        tail = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
        return ProcessState((), failed={upstream: f"the process ended with {done.returncode}: {tail}"})
    rows = (
        PatchStatus(**{**row, "state": State(row["state"]), "targets": tuple(row["targets"])}) for row in data["rows"]
    )
    return ProcessState(tuple(rows), tuple(data["unfired"]), tuple(data["foreign"]), data["failed"])


def main(upstream: str) -> int:
    """Import the modules of the needed patches of one upstream and print what became of them."""
    chosen = settings.read(entries)
    needed = [patch_id for patch_id, entry in entries.items() if entry.patch.upstream == upstream]
    decided = decisions(chosen, needed)
    wanted = [(entries[one].patch, decided[one]) for one in needed if decided[one].action is not Action.NOTHING]
    failed: dict[str, str] = {}
    for prepare in dict.fromkeys(patch.prepare for patch, _ in wanted if patch.prepare):
        prepare()
    for patch, decision in wanted:
        targets = decision.variant.required if decision.variant else ()
        for name in dict.fromkeys([*(target.module for target in targets), *patch.probe_after]):
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001 # every way to fail is an answer here
                failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    found = process()
    rows = [row.as_dict() for row in found.rows if row.upstream == upstream]
    result = {"rows": rows, "unfired": found.unfired, "foreign": found.foreign, "failed": failed}
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
