"""What a person reads out of a run's folder: which processes there were, and where they differ."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ultra_patches.core.gate import BAD
from ultra_patches.errors import UltraPatchesError
from ultra_patches.run_dir import record
from ultra_patches.run_dir.record import IN_FORCE, Process

#: What vLLM calls those of its processes that load plug-ins.
_ROLES = re.compile(r"EngineCore|VllmWorker")
HEADINGS = ("host", "pid", "rank", "role", "imported", "digest", "patches")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run: `broken` has a line for each that cannot be read, `groups` the processes by upstream and digest."""

    processes: tuple[Process, ...]
    broken: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, dict[str, tuple[Process, ...]]]:
        found: dict[str, dict[str, list[Process]]] = {}
        for upstream, users in _users(self).items():
            usual = _usual_kinds(upstream, users)
            group = found.setdefault(upstream, {})
            for user in users:
                group.setdefault(user.digest(upstream, usual), []).append(user)
        return {name: {digest: tuple(users) for digest, users in group.items()} for name, group in found.items()}


def read(folder: str | os.PathLike[str]) -> RunFolder:
    """Read every file of a run. Raises UltraPatchesError where there is none, or one of another format."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.name.endswith(".json") and not e.name.startswith("."))
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UltraPatchesError(f"{os.fspath(folder)} cannot be read: {why}") from error
    processes, broken = [], []
    for name in names:
        try:
            processes.append(record.read(Path(folder, name)))
        except FileNotFoundError:  # deleted since it was listed
            continue
        except OSError as error:
            broken.append(f"{name} cannot be read: {error.strerror}")
        except ValueError:
            broken.append(f"{name} is no whole file of ultra-patches")
    if not processes and not broken:
        raise UltraPatchesError(
            f"no process wrote to {os.fspath(folder)}: set ULTRA_PATCHES_RUN_DIR to it on every host"
        )
    return RunFolder(tuple(sorted(processes, key=lambda p: (p.host, p.pid, p.file))), tuple(broken))


def _users(run: RunFolder) -> dict[str, list[Process]]:
    names = sorted({name for process in run.processes for name in process.imported})
    return {name: [process for process in run.processes if name in process.imported] for name in names}


def _usual(words: Iterable[str]) -> tuple[str, int]:
    """The most frequent word and how often; of several, the one that says that a patch is in force."""
    counts = Counter(words)
    word = max(sorted(counts), key=lambda word: (counts[word], word == IN_FORCE, word != "not declared"))
    return word, counts[word]


def _usual_kinds(upstream: str, users: Sequence[Process]) -> dict[str, str]:
    """The state of each patch in most of the processes that declare it and have imported its target."""
    ids = sorted({name for user in users for name, (of, _, _) in user.patches.items() if of == upstream})
    settled = {name: [u.kind(name) for u in users if u.kind(name) not in ("armed", "not declared")] for name in ids}
    return {name: _usual(kinds)[0] if kinds else IN_FORCE for name, kinds in settled.items()}


def differences(run: RunFolder) -> list[str]:
    """One line for each way in which a process that imported an upstream is not like most of the others."""
    lines: dict[str, None] = {}
    for upstream, users in _users(run).items():
        version, of_version = _usual(str(user.imported[upstream]) for user in users)
        overlay, of_overlay = _usual(user.overlay for user in users)
        kinds = {
            patch_id: [usual if (kind := user.kind(patch_id)) == "armed" else kind for user in users]
            for patch_id, usual in _usual_kinds(upstream, users).items()
        }
        usual_of = {patch_id: _usual(all_kinds) for patch_id, all_kinds in kinds.items()}
        for number, user in enumerate(users):
            found = str(user.imported[upstream])
            if found != version:
                lines[f"{user.name}: {upstream} {found}, {version} in {of_version} of {len(users)}"] = None
            if user.overlay != overlay:
                lines[f"{user.name}: ultra-patches {user.overlay}, {overlay} in {of_overlay} of {len(users)}"] = None
            for patch_id, all_kinds in kinds.items():
                kind, of_kind = usual_of[patch_id]
                mine = all_kinds[number]
                # Another release may well need another correction; the release itself is named above.
                if mine == kind or (found != version and {mine, kind} == {IN_FORCE, "not-needed"}):
                    continue
                why = f" ({user.patches[patch_id][2]})" if patch_id in user.patches else ""
                lines[f"{user.name}: {patch_id} {user.kind(patch_id)}{why}, {kind} in {of_kind} of {len(users)}"] = None
    return list(lines)


def silent(run: RunFolder) -> list[str]:
    """One line for each process of vLLM, and for the ranks of each launcher, that must have run and left no file."""
    lines = []
    here = {(process.host, process.pid) for process in run.processes}
    for process in run.processes:
        for pid, name in process.children:
            if _ROLES.match(name) and (process.host, pid) not in here:
                lines.append(
                    f"{process.host} pid {pid} ({name}), started by pid {process.pid} ({process.role}), left no file: it does not "
                    "have the overlay, or died before it wrote one; check VLLM_PLUGINS with `ultra-patches doctor`"
                )
    worlds: dict[tuple[str, int], set[int]] = {}
    for process in run.processes:
        if process.launched is not None:
            rank, world, at = process.launched
            worlds.setdefault((at, world), set()).add(rank)
    for (at, world), ranks in sorted(worlds.items()):
        # Not a list of all that are missing: the world is as large as the file says.
        missing = world - sum(rank < world for rank in ranks)
        if missing:
            first = itertools.islice((rank for rank in range(world) if rank not in ranks), 8)
            listed = ", ".join(map(str, first)) + (f" and {missing - 8} more" if missing > 8 else "")
            lines.append(
                f"rank {listed} of {world} at {at} left no file: no overlay there, or started before "
                "ULTRA_PATCHES_RUN_DIR was set; put `import ultra_patches` first in every rank"
            )
    return lines


def problems(run: RunFolder) -> list[str]:
    """Every line for which `status --run-dir` fails: differences, bad states, processes without a file, broken files."""
    lacking: dict[str, list[str]] = {}
    for user in run.processes:
        for patch_id, (upstream, state, reason) in user.patches.items():
            if upstream in user.imported and state in BAD:
                lacking.setdefault(f"{patch_id} {state} ({reason})", []).append(user.name)
    several = [f"{what} in {len(names)} processes, first {names[0]}" for what, names in sorted(lacking.items())]
    return [*differences(run), *several, *silent(run), *run.broken]


def table(run: RunFolder) -> list[tuple[str, ...]]:
    """One row of texts a process, under HEADINGS."""
    digests = {
        (user.file, name): digest
        for name, group in run.groups.items()
        for digest, users in group.items()
        for user in users
    }
    rows: list[tuple[str, ...]] = []
    for process in run.processes:
        counts = Counter(map(process.kind, process.patches))
        patches = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        imported = ", ".join(f"{name} {version or '?'}" for name, version in process.imported.items()) or "-"
        shown = ", ".join(digests[process.file, name] for name in process.imported) or "-"
        rank = "-" if process.rank is None else str(process.rank)
        rows.append((process.host, str(process.pid), rank, process.role, imported, shown, patches))
    return rows
