"""The matrix as tests: what is recorded agrees with what is declared, and the tables are made of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compat import __main__, matrix, page, pages, results, scan
from tests.support import releases
from tests.support.kept import keep
from ultra_patches.core import facts, lock
from ultra_patches.patch import Patch

ALL = [patch for name in matrix.read() for patch in matrix.patches_of(name)]
LOCK = Path(lock.__file__).with_name("lock.json")


@pytest.mark.parametrize("patch", ALL, ids=lambda p: p.id)
def test_every_release_has_a_verdict_and_the_lock_alone_says_which_are_affected(patch: Patch) -> None:
    assert lock.load().measured(patch.id) == matrix.read()[patch.upstream].releases
    assert lock.load().affected(patch.id), "or it is no patch"
    assert (patch.affected, patch.fixed_in) == ("", None), "both would repeat the lock"


def test_every_first_affected_and_first_fixed_release_is_a_boundary() -> None:
    for name, supported in matrix.read().items():
        known = lock.load()
        ends = {end for p in matrix.patches_of(name) for end in (known.affected(p.id)[0], known.fixed_in(p.id)) if end}
        assert ends <= supported.in_ci, name


def cells() -> list[matrix.Cell]:
    return [matrix.Cell(s.name, r) for s in matrix.read().values() for r in s.releases if r not in s.not_live]


@pytest.mark.parametrize("cell", cells(), ids=lambda c: c.name)
def test_every_live_cell_was_run_with_this_patch_set_and_decided(cell: matrix.Cell) -> None:
    result = results.load(cell)
    assert result is not None, f"run `python -m compat run --cell {cell.name}`"
    assert result.patch_set == results.patch_set_digest(cell.upstream), f"run `python -m compat run --cell {cell.name}`"
    assert {p.id for p in matrix.patches_of(cell.upstream)} == set(result.patches)
    for patch_id, row in result.patches.items():
        assert row["verdict"] in results.DECIDED, (patch_id, row)
        if row["verdict"] == "corrected":
            seen = [row[mode]["verdict"] for mode in ("without", "alone", "together")]
            assert seen == ["defect", "clean", "clean"]
            assert {row[mode]["state"] for mode in ("alone", "together")} <= {"applied", "applied-late"}
            assert row["without"]["seconds"] < 10, "a probe is quick"


@pytest.mark.upstream
def test_lock_is_what_the_releases_say() -> None:
    found = scan.scan()
    assert found.failures == []
    assert scan.dump(scan.lock(found)) == LOCK.read_text(encoding="utf-8"), "run `python -m compat scan --write`"


@pytest.mark.parametrize(
    ("path", "made"),
    [(pages.PATCHES_MD, pages.patches_md), (page.PATH, page.html)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_made_of_the_results_is_current(path: Path, made: Callable[[], str]) -> None:
    assert path.read_text(encoding="utf-8") == made(), "run `python -m compat pages --write`"


def test_patches_md_names_where_the_notes_are_not_what_was_measured() -> None:
    text = pages.patches_md()
    assert "Differs from the notes: the upstream's notes say 0.22.0, measured is 0.26.0" in text
    assert text.count("Differs from the notes: no") == len([p for p in ALL if pages.difference(p) is None])


@pytest.mark.upstream
def test_the_cpu_build_has_the_files_of_the_official_release() -> None:
    upstream = facts.locate("vllm")
    assert upstream is not None
    assert upstream.version is not None
    releases.tree("vllm", upstream.version)
    keys = {key for p in matrix.patches_of("vllm") for key in p.keys}
    # Models of older releases are in neither.
    modules = {
        k.partition(":")[0] for k in keys if upstream.version not in lock.load().functions["vllm"][k].get("", ())
    }
    locked = json.loads(LOCK.read_text(encoding="utf-8"))["files"]["vllm"][upstream.version]
    for module in modules:
        path = upstream.path_of(module)
        assert path is not None, module
        assert hashlib.sha256(path.read_bytes()).hexdigest() == locked[matrix.file_of(module)], module


def run_cells(*flags: str) -> list[str]:
    """The names of the cells that `python -m compat run` would run with these flags."""
    args = __main__.parser().parse_args(["run", *flags])
    return [cell.name for cell in __main__.cells_of(args, matrix.read())]


def test_changed_repeats_the_ends_and_the_boundaries_that_are_not_of_this_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    ci = run_cells("--ci")
    assert run_cells("--changed") == ci, "no result is kept"
    for name, supported in matrix.read().items():
        for release in supported.releases:
            keep(matrix.Cell(name, release), {})
    ends = [f"{s.name}-{release}" for s in matrix.read().values() for release in (s.lowest, s.latest)]
    assert run_cells("--changed") == ends
    assert run_cells("--ci") == ci
    boundary = matrix.Cell("vllm", matrix.read()["vllm"].boundary[0])
    keep(boundary, {}, code="0" * 16)
    assert set(run_cells("--changed")) == {*ends, boundary.name}


def test_a_result_depends_on_what_runs_the_probes_and_on_the_rooms_of_its_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("compat", "ultra_patches"):
        shutil.copytree(matrix.ROOT.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = {name: results.patch_set_digest(name) for name in results.CODE}
    monkeypatch.setattr(results, "ROOT", tmp_path / "compat")
    assert {name: results.patch_set_digest(name) for name in results.CODE} == before
    for path, changed in {
        "compat/live.py": set(results.CODE),
        "ultra_patches/proving/process.py": set(results.CODE),
        "ultra_patches/bias/compile_salt.py": set(results.CODE),
        "ultra_patches/reload/session.py": {"vllm"},
        "ultra_patches/lora/toys.py": {"megatron-core", "megatron-bridge"},
        "ultra_patches/cli.py": set(),
    }.items():
        text = (tmp_path / path).read_text(encoding="utf-8")
        (tmp_path / path).write_text(text + "#\n", encoding="utf-8")
        assert {name for name in before if results.patch_set_digest(name) != before[name]} == changed, path
        (tmp_path / path).write_text(text, encoding="utf-8")
