"""What `examine` says of the functions of a process, and `doctor --import` of those of a fresh one."""

from __future__ import annotations

from typing import Any

import pytest

from .site_dir import Site
from .test_doctor import META, call, declare_toy, findings, install_overlay, only

EXAMINE = """
def examine():
    from dataclasses import asdict
    from ultra_patches.report.doctor import examine
    return [asdict(finding) for finding in examine()]
"""
FOREIGN = """
def set_over_it():
    import vllm.meta
    vllm.meta.f = fast
def fast():
    return 'foreign'
"""


@pytest.fixture
def vllm(site: Site) -> Site:
    install_overlay(site)
    site.write("vllm._version", "version = '0.20.0'\n")
    site.write("vllm.meta", META)
    site.write("foreign", FOREIGN)
    declare_toy(site, "known('affected', toy)")
    return site


def ask(site: Site, code: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = site.ask(f"{EXAMINE}\n{code}\nreport(examine())", flags=("-W", "ignore"))
    return found


def test_a_patch_that_is_set_is_no_finding(vllm: Site) -> None:
    assert ask(vllm, "import ultra_patches, vllm.meta") == []


def test_a_conflict_is_named_by_module_and_file(vllm: Site) -> None:
    found = ask(vllm, "import foreign; foreign.set_over_it()\nimport ultra_patches")
    check, severity, what, do = only(found)
    assert (check, severity, do) == ("process", "problem", "ultra-patches explain toy")
    assert what.startswith("toy is conflict: vllm.meta.f is foreign.fast (")
    assert str(vllm.root / "foreign.py") in what


def test_a_conflict_is_told_once_where_patches_share_the_function(vllm: Site) -> None:
    path = vllm.root / "declared.py"
    path.write_text(
        f"{path.read_text()}\nother = declare('other', ('vllm.meta', 'f'))\nknown('affected', toy)\nknown('unaffected', other)\n"
    )
    vllm.distribution("other", entry_points="[ultra_patches.patches]\nother = declared:other\n")
    found = ask(vllm, "import foreign; foreign.set_over_it()\nimport ultra_patches")
    assert only(found)[2].startswith("toy is conflict: ")


def test_a_late_patch_is_a_note_with_its_references(vllm: Site) -> None:
    vllm.write("user", "from vllm.meta import f\n")
    check, severity, what, do = only(ask(vllm, "import user\nimport ultra_patches"))
    assert (check, severity, do) == ("process", "note", "import ultra_patches before the upstream")
    assert what == "toy was set after vllm had been imported, 1 references rebound"


def test_a_hook_that_never_fired(vllm: Site) -> None:
    found = ask(
        vllm,
        "import sys\nbefore = list(sys.meta_path)\nimport ultra_patches\nsys.meta_path[:] = before\nimport vllm.meta",
    )
    check, severity, what, _ = only(found)
    assert (check, severity) == ("process", "problem")
    assert what == "toy is not set although vllm.meta:f is imported"


def test_an_import_that_waits_for_the_probe_is_no_finding(vllm: Site) -> None:
    vllm.write("vllm.other")
    text = "toy = declare('toy', ('vllm.meta', 'f'), origin='ultra-patches', probe_after=('vllm.other',))"
    vllm.write("declared", f"from unit.stub import *\nfrom ultra_patches.patch import *\nnothing_known()\n{text}\n")
    assert ask(vllm, "import ultra_patches, vllm.meta") == []


def test_what_stands_where_no_patch_is_to_be_set(vllm: Site) -> None:
    vllm.write(
        "declared",
        "from unit.stub import *\n" + (vllm.root / "declared.py").read_text().replace("'affected'", "'unaffected'"),
    )
    found = ask(vllm, "import ultra_patches, foreign; foreign.set_over_it()")
    check, severity, what, _ = only(found)
    assert (check, severity) == ("process", "note")
    assert what.startswith("replaced by someone else: vllm.meta.f is foreign.fast (")
    assert ask(vllm, "import ultra_patches, vllm.meta") == []


def test_a_patch_that_was_reverted_leaves_the_function_of_the_file(vllm: Site) -> None:
    assert ask(vllm, "import ultra_patches, vllm.meta\nultra_patches.revert('toy')") == []


def test_a_drifted_patch_needs_no_import(vllm: Site) -> None:
    vllm.write("vllm.meta", META + "\n\ndef g():\n    pass\n")
    vllm.write("declared", (vllm.root / "declared.py").read_text().replace("known('affected', toy)", ""))
    check, severity, what, _ = only(findings(vllm))
    assert (check, severity) == ("process", "problem")
    assert what.startswith("toy is drifted: source of vllm 0.20.0 is in no known release")
    assert "ultra-patches verify toy" in what
    assert only(findings(vllm, "--import"))[2] == what


def test_the_import_finds_what_sets_itself_over_the_module(vllm: Site) -> None:
    vllm.write("vllm.meta", META + "\n\nimport foreign\nf = foreign.fast\n")
    assert findings(vllm) == []
    found = findings(vllm, "--import")
    check, severity, what, _ = only(found)
    assert (check, severity) == ("process", "problem")
    assert str(vllm.root / "foreign.py") in what
    assert found[0]["where"] == "a fresh process that imports vllm"


def test_the_import_goes_well(vllm: Site) -> None:
    assert findings(vllm, "--import") == []
    assert call(vllm, "--import").stdout.startswith("nothing found")
    assert findings(vllm, "--import", ULTRA_PATCHES="strict") == []


def test_in_strict_mode_the_import_still_tells(vllm: Site) -> None:
    vllm.write("vllm.meta", META + "\n\nimport foreign\nf = foreign.fast\n")
    assert "toy is conflict" in only(findings(vllm, "--import", ULTRA_PATCHES="strict"))[2]


def test_nothing_is_imported_where_all_is_off(vllm: Site) -> None:
    vllm.write("vllm.meta", META + "\n\nraise SystemExit('imported')\n")
    assert [f["severity"] for f in findings(vllm, "--import", ULTRA_PATCHES="off")] == ["note"]


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise SystemExit('no GPU')", "vllm.meta cannot be imported: SystemExit: no GPU"),
        ("import os; os._exit(3)", "vllm cannot be imported: the process ended with 3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_note(vllm: Site, last: str, said: str) -> None:
    vllm.write("vllm.meta", f"{META}\n\n{last}\n")
    check, severity, what, _ = only(findings(vllm, "--import"))
    assert (check, severity) == ("process", "note")
    assert what.startswith(said)
