"""Patches are found through entry points, those of other distributions too; a broken one is told and the rest works."""

from __future__ import annotations

import pytest

from .site_dir import Site, write_distribution

LIST = (
    "from ultra_patches.core import discover\nfound, complaints = discover.patches()\nreport([list(found), complaints])"
)
GROUP = "[ultra_patches.patches]\n"


def test_the_overlay_brings_its_own(site: Site) -> None:
    found, complaints = site.ask(LIST)
    assert {"vllm-reload-numel-guard", "vllm-mamba-conv-weights", "vllm-ipc-rank-layout"} <= set(found)
    assert found == sorted(found)
    assert complaints == []


def test_another_distribution_adds_one(site: Site) -> None:
    own, _ = site.ask(LIST)
    site.declare("toy = declare('toy', (META, 'f'))", "toy")
    found, complaints = site.ask(LIST)
    assert set(found) == {*own, "toy"}
    assert complaints == []


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("import surely_absent", "surely_absent"),
        ("", "AttributeError"),
        ("PATCH = 'a text'", "is str, not ultra_patches.patch.Patch: ignored"),
    ],
    ids=["raises", "exits", "lacks a module", "lacks the name", "no Patch"],
)
def test_a_broken_one_is_told_and_the_others_work(site: Site, module: str, said: str) -> None:
    site.declare("toy = declare('toy', (META, 'f'))", "toy")
    site.write("broken", module)
    site.distribution("broken-patches", entry_points=f"{GROUP}bad = broken:PATCH\n")
    found, (complaint,) = site.ask(LIST)
    assert "toy" in found
    assert "vllm-reload-numel-guard" in found
    assert "'bad' of broken-patches" in complaint
    assert said in complaint
    assert "\n" not in complaint


def test_a_broken_one_is_a_warning_on_arming(site: Site) -> None:
    site.write("broken", "1 / 0")
    site.distribution("broken-patches", entry_points=f"{GROUP}bad = broken:PATCH\n")
    ended = site.run("import ultra_patches\nreport(len(ultra_patches.status()))")
    assert ended.value >= 8
    assert "update or remove broken-patches" in ended.stderr


def test_a_broken_one_is_an_error_in_strict_mode(site: Site) -> None:
    site.write("broken", "1 / 0")
    site.distribution("broken-patches", entry_points=f"{GROUP}bad = broken:PATCH\n")
    ended = site.start("-c", "import ultra_patches", env={"ULTRA_PATCHES": "strict"})
    assert ended.code == 1
    assert "UltraPatchesError: patch 'bad' of broken-patches cannot be read" in ended.stderr


def test_an_id_that_is_taken_is_told_and_ignored(site: Site) -> None:
    site.declare("toy = declare('toy', (META, 'f'))", "toy")
    site.write("other", "from unit.stub import declare\nPATCH = declare('toy', ('vllm.other', 'g'))\n")
    site.distribution("z-other", entry_points=f"{GROUP}toy = other:PATCH\n")
    found, (complaint,) = site.ask(LIST)
    assert found.count("toy") == 1
    assert complaint.endswith("takes the id 'toy' of another one: ignored")


def test_the_same_patch_found_twice_is_one(site: Site) -> None:
    site.declare("toy = declare('toy', (META, 'f'))", "toy")
    site.distribution("alias", entry_points=f"{GROUP}again = declared:toy\n")
    found, complaints = site.ask(LIST)
    assert (found.count("toy"), complaints) == (1, [])


@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=["default", "warnings are errors"])
def test_a_distribution_without_metadata_still_counts(site: Site, flags: tuple[str, ...]) -> None:
    site.write("lone", "from unit.stub import declare\nPATCH = declare('lone', ('vllm.other', 'g'))\n")
    site.distribution("lone", None, entry_points=f"{GROUP}lone = lone:PATCH\n")
    found, _ = site.ask(LIST, flags=flags)
    assert "lone" in found


def test_an_installed_overlay_is_read_from_its_entry_points(site: Site) -> None:
    """With the overlay's own metadata on the path its folder is not searched a second time."""
    point = "vllm-reload-numel-guard = ultra_patches.patches.vllm_reload_numel_guard:PATCH\n"
    write_distribution(site.root, "ultra-patches", "0.1.0", GROUP + point)
    found, complaints = site.ask(LIST)
    assert (found, complaints) == (["vllm-reload-numel-guard"], [])
