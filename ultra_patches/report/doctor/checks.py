"""Why a patch might not reach a process: what the environment, the metadata and the live functions say of it.

Each `check_…` takes facts and gives findings; `examine` gathers the facts of this process, also from a user's program.
Imports no upstream and no torch.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ultra_patches.core import facts, settings
from ultra_patches.core.discover import GROUP
from ultra_patches.core.gate import BAD, State
from ultra_patches.report.doctor.diagnosis import Diagnosis
from ultra_patches.report.doctor.facts import Installed, Point, ProcessState

PLUGIN = "ultra_patches"
_UNPATCHED = "vLLM's API server, EngineCore and workers start without the patches"
#: Entry points of ours that others look for, and what does not happen without them.
_LOADED_BY = {
    ("vllm.general_plugins", "ultra_patches.entrypoints.vllm_plugin:register"): _UNPATCHED,
    ("pytest11", "ultra_patches.entrypoints.pytest_plugin"): "pytest does not know @pytest.mark.requires_patch",
}
_PREFIXES, _NAMES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_ENVIRONMENT = "environment of this process"


def check_plugins(value: str | None, known: Collection[str]) -> Iterator[Diagnosis]:
    """`VLLM_PLUGINS` as vLLM reads it: unset loads every plugin, else each text between commas is a name, blanks included."""
    if value is None:
        return
    words, names = value.split(","), {*known, PLUGIN}
    meant = {word: _meant(word, names) for word in words if word.strip() and word not in names}
    if PLUGIN not in words:
        ours = next((word for word, name in meant.items() if name == PLUGIN), None)
        why = f"does not name {PLUGIN}" if value else "is empty, which vLLM reads as no plugin at all"
        why = why if ours is None else f"does not name {PLUGIN}: {ours!r} is another name{_blanks(ours)}"
        kept = [name for word in words if (name := word if word in names else meant.get(word))]
        fixed = _typed(",".join(dict.fromkeys([*kept, PLUGIN])))
        what = f"VLLM_PLUGINS={value!r} {why}"
        yield Diagnosis("plugins", "problem", what, _ENVIRONMENT, _UNPATCHED, f"export VLLM_PLUGINS={fixed}")
    for word, name in meant.items():
        if name != PLUGIN or PLUGIN in words:
            what = f"VLLM_PLUGINS names {word!r}, which no installed plugin is called{_blanks(word)}"
            do = f"write {name}" if name else "take it out, or install what brings it"
            yield Diagnosis("plugins", "note", what, _ENVIRONMENT, "vLLM passes over it in silence", do)


def _typed(text: str) -> str:
    return shlex.quote(text) if text.isprintable() else ascii(text)


def _meant(word: str, names: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word.strip(), sorted(names), n=1, cutoff=0.7)), None)


def _blanks(word: str) -> str:
    return "" if word == word.strip() else " (vLLM does not strip blanks)"


def check_entry_points(
    found: Sequence[Installed], visible: Collection[Point], own: Collection[str], package: Path, vllm: bool
) -> Iterator[Diagnosis]:
    """Whether others find the overlay: `visible` are the entry points that importlib.metadata gives, `own` our patches."""
    say = partial(Diagnosis, "entry points")
    if not found:
        means = "vLLM and pytest find it by its metadata only, so they do not load it; `import ultra_patches` works"
        what, do = "ultra_patches can be imported, but is not installed", f"pip install {_source(package)}"
        yield say("problem" if vllm else "note", what, str(package), means, do)
        return
    first, *others = found
    modules = {value.partition(":")[0] for group, _, value in visible if group == GROUP}
    lost = [name for name in own if f"ultra_patches.patches.{name}" not in modules]
    points = {(group, PLUGIN, value): means for (group, value), means in _LOADED_BY.items()}
    missing = {p[0]: points[p] for p in points if p not in visible and (vllm or p[0] != "vllm.general_plugins")}
    if 0 < len(lost) < len(own):  # without any of them the overlay reads its folder
        missing[GROUP] = f"not set: {', '.join(lost)}"
    for group, means in missing.items():
        better = next((other for other in others if any(point[0] == group for point in other.points)), None)
        what = f"{first} lacks our entry point in {group}" + (f", and hides {better}, which has it" if better else "")
        do = f"remove {first.path}" if better else f"pip install --force-reinstall --no-deps {_source(package)}"
        yield say("note" if group == "pytest11" else "problem", what, str(first.path), means, do)
    if others and not missing:
        what, where = f"{len(found)} distributions are called {first.name}", ", ".join(map(str, found))
        means = f"{first.path} comes first, so its entry points count and those of the others do not"
        yield say("note", what, where, means, f"remove {others[0].path}, or {first.path} where that is the stale one")
    if package.parent.resolve() != first.home.resolve():
        what = f"ultra_patches is imported from {package}, but {first} is what is installed"
        means = "a process that is started elsewhere has the other copy, perhaps with other patches"
        do = f"check PYTHONPATH and the folder you are in, or pip install {_source(package)}"
        yield say("problem", what, str(package), means, do)


def _source(package: Path) -> str:
    installed = package.parent.name in ("site-packages", "dist-packages")
    return "the wheel or checkout that it came from" if installed else f"-e {package.parent}"


def check_upstream(
    upstream: facts.Upstream, claims: Sequence[Installed], copies: Sequence[Path]
) -> Iterator[Diagnosis]:
    """Whether what is imported is what the metadata speaks of; `copies` are shadowed ones further down the path."""
    say = partial(Diagnosis, "upstreams")
    package, where = upstream.package, ", ".join(map(str, (upstream.root, *copies)))
    names, homes = dict.fromkeys(claim.name for claim in claims), {claim.home.resolve() for claim in claims}
    means = "a process with another path imports another copy, and may need other patches"
    do = f"take {upstream.root.parents[package.count('.')]} off PYTHONPATH and sys.path, or uninstall the other"
    listed = ", ".join(map(str, claims))
    if len(names) > len(homes):
        over = "the files of the one installed last lie over those of the other"
        what, fix = f"{listed} bring {package} into one folder", f"pip uninstall {' '.join(names)}, then install one"
        yield say("problem", what, where, over, fix)
    elif len(claims) > 1:
        fix = do if copies else "remove the metadata that does not belong to the package"
        told = f"{means}; who asks for the version is told that of the first"
        yield say("note", f"{package} has metadata in {len(claims)} places: {listed}", where, told, fix)
    if upstream.conflict:
        yield say("problem", upstream.conflict, where, means, do)
    elif claims and not any(map(upstream.root.resolve().is_relative_to, homes)):
        what = f"{package} is imported from {upstream.root}, but {listed} belongs to another copy"
        yield say("problem", what, where, means, do)
    elif copies and len(claims) == 1:
        yield say("note", f"{package} is on the path {1 + len(copies)} times; the first is imported", where, means, do)


def check_version(upstream: facts.Upstream, releases: Collection[str]) -> Iterator[Diagnosis]:
    """Whether this release was measured. Patches are decided by the source, so that this alone is no problem."""
    from packaging.version import InvalidVersion, Version

    said = f"{upstream.name} {upstream.version}"
    try:
        version = Version(upstream.version or "")
        known = {Version(release) for release in releases}
        if not known or Version(version.public) in known:
            return
        newest = max(known)
        what = (
            f"{said} is newer than {newest}, the last that was measured"
            if version > newest
            else f"{said} was not measured"
        )
    except InvalidVersion:
        what = f"{said} is no version" if upstream.version else f"{upstream.name} states no version"
    means = "a function that has the source of a measured release gets its verdict, a changed one is probed"
    yield Diagnosis("upstreams", "note", what, str(upstream.root), means, "ultra-patches verify")


def check_record(upstream: facts.Upstream, rewritten: Mapping[Path, Sequence[str]]) -> Iterator[Diagnosis]:
    """`rewritten` holds the functions of ours in each file that is not as RECORD says."""
    for path, names in rewritten.items():
        what = f"{path.name} of {upstream.distribution} was rewritten after installation; it holds {', '.join(names)}"
        means = "other hosts may have the original code; a function that was changed is probed"
        do = f"ultra-patches verify, or pip install --force-reinstall --no-deps {upstream.distribution}=={upstream.metadata_version}"
        yield Diagnosis("upstreams", "note", what, str(path), means, do)


def check_settings(chosen: settings.Settings, ids: Collection[str], unread: Sequence[str] = ()) -> Iterator[Diagnosis]:
    """What the user has set; `unread` are the declarations of patches that cannot be read."""
    for text in unread:
        yield Diagnosis("entry points", "problem", text, "installed metadata", "that patch is not set", "pip check")
    for text in chosen.complaints:
        means = "what you meant is not in force, and with ULTRA_PATCHES=strict the import of ultra_patches is an error"
        name = "".join(re.findall(r"^[^\s:=]+", text))
        yield Diagnosis("settings", "problem", text, _ENVIRONMENT, means, f"correct {name}, or unset {name}")
    excluded: dict[str, list[str]] = {}
    for patch_id in sorted(ids):
        excluded.setdefault(chosen.excludes(patch_id) or "", []).append(patch_id)
    for why, names in excluded.items():
        if why:
            means = (
                "these patches are not set in a process with this variable, even where the installed code needs them"
            )
            do = f"unset {why.split()[-1].partition('=')[0]}"
            yield Diagnosis("settings", "note", f"{why}: {', '.join(names)}", _ENVIRONMENT, means, do)


def check_run_dir(folder: str, exists: bool, failure: str | None) -> Iterator[Diagnosis]:
    """`failure` is why a file cannot be made there, None where it can."""
    if failure is None and exists:
        return
    what = f"ULTRA_PATCHES_RUN_DIR={folder!r} " + (
        f"cannot be written ({failure})" if failure else "does not exist yet"
    )
    means = (
        "no process can write down which patches it has"
        if failure
        else "the first process makes it; each host has its own unless it lies on a shared file system"
    )
    do = "name a folder that every process may write" if failure else f"mkdir -p {_typed(folder)}"
    yield Diagnosis("settings", "problem" if failure else "note", what, _ENVIRONMENT, means, do)


def check_ray(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """vLLM copies variables to the Ray workers that it starts by prefix and by name."""
    prefixes, names = ([w.strip() for w in environ.get(v, "").split(",") if w.strip()] for v in (_PREFIXES, _NAMES))
    ours = [name for name in sorted(environ) if name.startswith("ULTRA_PATCHES") and environ[name]]
    left = [name for name in ours if name not in names and not name.startswith(tuple(prefixes))]
    if left:
        fixed = _typed(",".join(dict.fromkeys([*prefixes, "ULTRA_PATCHES"])))
        what = f"{', '.join(left)} set, but {_PREFIXES} lacks ULTRA_PATCHES"
        do = f"export {_PREFIXES}={fixed}, or ray.init(runtime_env=ultra_patches.entrypoints.ray.runtime_env())"
        yield Diagnosis("ray", "note", what, _ENVIRONMENT, "where vLLM runs on Ray, its workers do not get it", do)


def check_model_runner(value: str | None, modules: Collection[str]) -> Iterator[Diagnosis]:
    """Which runner is active is known in an engine only; `modules` hold the functions that patches replace."""
    if value is None:
        return
    inside = sorted(name for name in modules if "model_runner" in name or name.startswith("vllm.v1.worker.gpu."))
    means = (
        f"{', '.join(inside)} may be code of the other runner"
        if inside
        else "none of the functions that we replace lies in a runner, so either runner gets the patches"
    )
    do = "ultra-patches status --run-dir DIR after a run: what each worker has"
    yield Diagnosis("model runner", "note", f"VLLM_USE_V2_MODEL_RUNNER={value!r}", _ENVIRONMENT, means, do)


def check_process(process: ProcessState, where: str) -> Iterator[Diagnosis]:
    """What became of the patches in one process."""
    say = partial(Diagnosis, "process")
    for row in process.rows:
        explain = f"ultra-patches explain {row.id}"
        if row.state in BAD:
            means = f"not corrected here: {row.title}"
            yield say("problem", f"{row.id} is {row.state.value}: {row.reason}", where, means, explain)
        elif row.state is State.APPLIED_LATE:
            what = f"{row.id} was set after {row.upstream} had been imported, {row.rebound} references rebound"
            means = "the patch is in force, but objects and closures that were made before still hold the old function"
            yield say("note", what, where, means, "import ultra_patches before the upstream")
        elif row.id in process.unfired:
            what = f"{row.id} is not set although {', '.join(row.targets)} is imported"
            means = (
                "the import did not go through our hook: another import hook comes first, or sys.meta_path was replaced"
            )
            yield say(
                "problem", what, where, means, "import ultra_patches after everything else that changes sys.meta_path"
            )
    for text in process.foreign:
        means = "we replace nothing there, so it stays; but whether a patch is needed was decided by the file, which is not what runs"
        yield say("note", f"replaced by someone else: {text}", where, means, "remove it unless you want it")
    for module, text in process.failed.items():
        means = "whether its functions can be replaced could not be seen"
        yield say("note", f"{module} cannot be imported: {text}", where, means, f"python -c 'import {module}'")
