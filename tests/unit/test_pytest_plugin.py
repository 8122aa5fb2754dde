"""What a test run shows and refuses, in sessions of their own with a toy patch."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from .site_dir import Ended, Site
from .stub import META

PLUGIN = "ultra_patches.entrypoints.pytest_plugin"
HEAD = f"import pytest, {META} as meta\n"


@pytest.fixture
def project(site: Site) -> Site:
    """Has the toy patch, whose target is a stub of vLLM's."""
    for_old_python = [
        name for name in ("exceptiongroup", "tomli", "typing_extensions") if importlib.util.find_spec(name)
    ]
    site.library("pytest", "_pytest", "py", "pluggy", "iniconfig", *for_old_python)
    site.write(META, "def f():\n    return 'upstream'\n")
    site.distribution("pluggy")  # pytest looks its version up
    site.distribution("vllm", "0.20.0")
    site.declare("toy = declare('toy', (META, 'f'))\nknown('affected', toy)\n", "toy")
    return site


def session(project: Site, tests: str, folder: Path, **env: str) -> Ended:
    (folder / "suite").mkdir()
    (folder / "suite" / "test_it.py").write_text(HEAD + tests)
    arguments = ("-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "-rA", "test_it.py")
    # Without autoload: where the entry point is found as well, pytest refuses the module under a second name.
    return project.start(*arguments, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env}, cwd=folder / "suite")


def test_the_header_counts_the_states(project: Site, tmp_path: Path) -> None:
    ended = session(project, "def test(): pass\n", tmp_path)
    import ultra_patches

    assert ended.code == 0, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("ultra-patches ")]
    assert line.startswith(f"ultra-patches {ultra_patches.__version__}: 1 armed, ")
    assert line.endswith(" disabled")


def test_a_test_whose_patch_is_in_force_runs(project: Site, tmp_path: Path) -> None:
    text = "@pytest.mark.requires_patch('toy')\ndef test(): assert meta.f() == 'corrected'\n"
    assert session(project, text, tmp_path).code == 0


def test_a_patch_that_is_not_needed_is_enough(project: Site, tmp_path: Path) -> None:
    text = (project.root / "declared.py").read_text()
    (project.root / "declared.py").write_text(text.replace("'affected'", "'unaffected'"))
    body = """
    @pytest.mark.requires_patch('toy')
    def test():
        import ultra_patches
        assert meta.f() == 'upstream'
        assert [row.state.value for row in ultra_patches.status() if row.id == 'toy'] == ['not-needed']
    """
    ended = session(project, textwrap.dedent(body), tmp_path)
    assert ended.code == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("mark", "env", "said"),
    [
        ("'toy'", {"ULTRA_PATCHES_DISABLE": "toy"}, "toy is required but disabled: listed in ULTRA_PATCHES_DISABLE"),
        ("'toy'", {"ULTRA_PATCHES": "off"}, "toy is required but disabled: ULTRA_PATCHES=off"),
        ("'toy', 'tyo'", {}, "no patch is called 'tyo' (did you mean toy"),
        ("", {}, "requires_patch takes one patch id or more"),
        ("id='toy'", {}, "requires_patch takes one patch id or more"),
    ],
)
def test_a_test_without_its_patch_fails_with_the_reason(
    project: Site, tmp_path: Path, mark: str, env: dict[str, str], said: str
) -> None:
    text = f"@pytest.mark.requires_patch({mark})\ndef test(): print('its body ran')\ndef test_other(): pass\n"
    ended = session(project, text, tmp_path, **env)
    assert ended.code == 1, ended.stdout + ended.stderr
    assert said in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout
    assert "its body ran" not in ended.stdout
    assert "skipped" not in ended.stdout


def test_a_fixture_may_import_the_upstream(project: Site, tmp_path: Path) -> None:
    text = f"""
import sys
del sys.modules["{META}"]
import ultra_patches
ultra_patches.core.overlay.disarm(); ultra_patches.core.overlay.arm()

@pytest.fixture
def upstream():
    assert next(row for row in ultra_patches.status() if row.id == "toy").state == "armed"
    import {META} as again
    return again

@pytest.mark.requires_patch('toy')
def test(upstream): assert upstream.f() == 'corrected'
"""
    ended = session(project, text, tmp_path)
    assert ended.code == 0, ended.stdout + ended.stderr


def test_a_failure_names_the_patches_in_force(project: Site, tmp_path: Path) -> None:
    ended = session(project, "def test(): assert meta.f() == 'other'\ndef test_fine(): pass\n", tmp_path)
    assert ended.code == 1
    assert ended.stdout.count("patches in force") == 1
    assert f"toy applied to vllm 0.20.0: {META}:f" in ended.stdout


def test_a_failure_without_patches_in_force_has_no_section(project: Site, tmp_path: Path) -> None:
    ended = session(project, "def test(): assert meta.f() == 'other'\n", tmp_path, ULTRA_PATCHES="off")
    assert ended.code == 1
    assert "patches in force" not in ended.stdout
