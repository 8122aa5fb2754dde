"""What `doctor` says of the environment and of the functions of a process, and how it exits."""

from __future__ import annotations

import json
import re
import shlex
import string
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultra_patches.report.doctor import checks as doctor
from ultra_patches.report.doctor import examine

from .site_dir import PROJECT, Ended, Site

KNOWN = ("lora_filesystem_resolver", "lora_hf_hub_resolver", "ultra_patches")
META = "def f():\n    return 'upstream'\n"
#: It passes for one of the overlay's own, so that those are not looked for in the stubs.
TOY = "toy = declare('toy', ('vllm.meta', 'f'), origin='ultra-patches')\n"


def own_entry_points() -> str:
    """Those of pyproject.toml by which others load the overlay, as a build backend writes them."""
    text = (PROJECT / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."?([\w.]+)"?\]\n((?:.+\n)+)', text, re.MULTILINE)
    loaders = [(group, lines) for group, lines in groups if group != "ultra_patches.patches"]
    assert len(loaders) == 3
    return "".join(f"[{group}]\n{lines.replace(chr(34), '')}\n" for group, lines in loaders)


def install_overlay(site: Site, version: str = "0.1.0") -> Path:
    """The metadata of an editable installation of this checkout."""
    folder = site.distribution("ultra-patches", version, own_entry_points())
    url = {"url": PROJECT.as_uri(), "dir_info": {"editable": True}}
    (folder / "direct_url.json").write_text(json.dumps(url))
    return folder


def call(site: Site, *arguments: str, **env: str) -> Ended:
    return site.start("-m", "ultra_patches", "doctor", *arguments, env=env)


def findings(site: Site, *arguments: str, **env: str) -> list[dict[str, Any]]:
    """Each finding, after checking that the exit status agrees and that nothing else is printed."""
    ended = call(site, "--json", *arguments, **env)
    assert ended.stderr == ""
    data = json.loads(ended.stdout)
    assert (data["schema"], data["kind"]) == (1, "doctor")
    found: list[dict[str, Any]] = data["findings"]
    assert ended.code == int(any(finding["severity"] == "problem" for finding in found))
    for finding in found:
        assert set(finding) == {"check", "severity", "what", "where", "means", "do"}
        assert all(isinstance(text, str) and text and "\n" not in text for text in finding.values()), finding
    return found


def only(found: list[dict[str, Any]]) -> tuple[str, str, str, str]:
    (one,) = found
    return one["check"], one["severity"], one["what"], one["do"]


@pytest.fixture
def vllm(site: Site) -> Site:
    """A measured vLLM whose one function is affected, and the overlay, as pip installs them."""
    install_overlay(site)
    site.write("vllm._version", "__version__ = version = '0.20.0'\n")
    site.write("vllm.meta", META)
    site.distribution("vllm", "0.20.0")
    declare_toy(site, "known('affected', toy)")
    return site


def declare_toy(site: Site, text: str) -> None:
    site.declare(TOY + text, "toy")
    site.declared = []  # nothing has to be excluded


def would_load(value: str | None) -> bool:
    """vLLM's own rule: `vllm.envs` splits at commas, `vllm.plugins` looks for the name of the entry point in the list."""
    return value is None or "ultra_patches" in value.split(",")


_words = st.one_of(
    st.sampled_from(["", " ", "ultra_patches", " ultra_patches", "ultra_patches\t", "ultra-patches", "Ultra_Patches"]),
    st.sampled_from([*KNOWN, "lora_filesystem_resolvr", '"ultra_patches"', "ultra_patch", "x"]),
    st.text(max_size=12),
)
_values = st.one_of(st.none(), st.text(max_size=40), st.lists(_words, max_size=5).map(",".join))


@given(_values)
@settings(max_examples=300)
def test_a_problem_with_the_plugins_is_where_vllm_would_not_load_us(value: str | None) -> None:
    found = list(doctor.check_plugins(value, KNOWN[:2]))
    problems = [finding.do for finding in found if finding.severity == "problem"]
    assert bool(problems) is not would_load(value)
    for do in problems:
        command, assignment = shlex.split(do)
        fixed = assignment.removeprefix("VLLM_PLUGINS=")
        assert (command, list(doctor.check_plugins(fixed, KNOWN[:2]))) == ("export", [])
        assert set((value or "").split(",")) & set(KNOWN) <= set(fixed.split(","))


_printable = st.text(string.printable, max_size=20)
#: With what stands for bytes that are no UTF-8.
_text = st.text(max_size=20) | st.text(["\udcff", "\x85", "\n", ",", "a"], max_size=5)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "VLLM_PLUGINS": _text,
            "ULTRA_PATCHES": st.one_of(st.sampled_from(["off", "warn", "strict"]), _printable),
            "ULTRA_PATCHES_DISABLE": st.one_of(st.just("vllm-ipc-rank-layout"), _text),
            "ULTRA_PATCHES_ONLY": _text,
            "ULTRA_PATCHES_RUN_DIR": st.one_of(_printable.map("/nowhere/".__add__), _text),
            "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": _text,
            "VLLM_USE_V2_MODEL_RUNNER": _text,
        },
    )
)
@settings(max_examples=25)
def test_no_environment_is_too_odd(env: dict[str, str]) -> None:
    found = examine(env)
    assert [f.severity for f in found] == sorted((f.severity for f in found), reverse=True)
    for finding in found:
        assert all(len(text.splitlines()) == 1 and text.encode() for text in astuple(finding)), finding


def test_bytes_that_are_no_text(vllm: Site) -> None:
    vllm.write("ray.actor")
    names = ("VLLM_PLUGINS", "ULTRA_PATCHES", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "VLLM_USE_V2_MODEL_RUNNER")
    env = {**dict.fromkeys(names, "\udcff\n"), "ULTRA_PATCHES_RUN_DIR": "/tmp/\udcff\n/nowhere"}
    assert {f["check"] for f in findings(vllm, **env)} == {"plugins", "settings", "ray", "model runner"}
    ended = call(vllm, **env)
    assert (ended.code, ended.stderr) == (1, "")


def test_nothing_is_found(vllm: Site) -> None:
    ended = call(vllm)
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout == "nothing found that keeps a patch from a process (vllm 0.20.0)\n"
    assert findings(vllm) == []


def test_nothing_is_imported(vllm: Site) -> None:
    (vllm.root / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert findings(vllm) == []


@pytest.mark.parametrize(
    ("value", "said", "do"),
    [
        ("", "is empty, which vLLM reads as no plugin at all", "ultra_patches"),
        ("lora_a", "does not name ultra_patches", "lora_a,ultra_patches"),
        (
            "lora_a, ultra_patches",
            "' ultra_patches' is another name (vLLM does not strip blanks)",
            "lora_a,ultra_patches",
        ),
        ("ultra-patches", "'ultra-patches' is another name", "ultra_patches"),
    ],
)
def test_plugins_that_leave_us_out(vllm: Site, value: str, said: str, do: str) -> None:
    vllm.distribution("lora", "1.0", "[vllm.general_plugins]\nlora_a = lora:a\n")
    check, severity, what, typed = only(findings(vllm, VLLM_PLUGINS=value))
    assert (check, severity, typed) == ("plugins", "problem", f"export VLLM_PLUGINS={do}")
    assert what.startswith(f"VLLM_PLUGINS={value!r} ")
    assert said in what


def test_a_plugin_of_another_group_is_known_and_a_misspelt_one_is_a_note(vllm: Site) -> None:
    vllm.distribution("plugins", "1.0", "[vllm.platform_plugins]\nmy_chip = chip:a\n")
    assert findings(vllm, VLLM_PLUGINS="my_chip,ultra_patches") == []
    check, severity, what, do = only(findings(vllm, VLLM_PLUGINS="my_chp,ultra_patches"))
    assert (check, severity, do) == ("plugins", "note", "write my_chip")
    assert "'my_chp'" in what


def test_plugins_do_not_matter_without_vllm(site: Site) -> None:
    install_overlay(site)
    declare_toy(site, "")
    assert findings(site, VLLM_PLUGINS="") == []
    assert call(site).stdout == "nothing found that keeps a patch from a process (no upstream installed)\n"


def test_for_people_each_line_is_whole(vllm: Site) -> None:
    ended = call(vllm, VLLM_PLUGINS="[red]x[/red]" + 150 * "y")
    assert ended.code == 1
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("problem plugins: VLLM_PLUGINS='[red]x[/red]yyy")
    assert [line.split()[0] for line in lines] == ["problem", "where", "means", "do", "note", "where", "means", "do"]
    assert lines[3] == "  do    export VLLM_PLUGINS=ultra_patches"


@pytest.mark.parametrize(
    ("variable", "severity", "said", "do"),
    [
        ({"ULTRA_PATCHES": "stict"}, "problem", "did you mean strict?", "correct ULTRA_PATCHES, or"),
        ({"ULTRA_PATCHES_ONLY": "tooy"}, "problem", "did you mean toy?", "correct ULTRA_PATCHES_ONLY, or"),
        ({"ULTRA_PATCHES": "off"}, "note", "ULTRA_PATCHES=off: ", "unset ULTRA_PATCHES"),
        ({"ULTRA_PATCHES_DISABLE": "toy"}, "note", "in ULTRA_PATCHES_DISABLE: toy", "unset ULTRA_PATCHES_DISABLE"),
        ({"ULTRA_PATCHES_ONLY": "tooy"}, "note", "ULTRA_PATCHES_ONLY: toy", "unset ULTRA_PATCHES_ONLY"),
        ({"ULTRA_PATCHES_RUN_DIR": "here"}, "problem", "is not absolute", "correct ULTRA_PATCHES_RUN_DIR, or"),
        ({"ULTRA_PATCHES_RUN_DIR": "/dev/null/x"}, "problem", "cannot be written (Not a directory)", "name a folder"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_settings(vllm: Site, variable: dict[str, str], severity: str, said: str, do: str) -> None:
    found = [f for f in findings(vllm, **variable) if f["severity"] == severity]
    check, _, what, typed = only(found)
    assert check == "settings"
    assert said in what
    assert typed.startswith(do)


def test_the_folder_of_the_run(vllm: Site, tmp_path: Path) -> None:
    there = tmp_path / "run"
    _, severity, what, do = only(findings(vllm, ULTRA_PATCHES_RUN_DIR=str(there)))
    assert (severity, do) == ("note", f"mkdir -p {there}")
    assert what.endswith("does not exist yet")
    assert not there.exists()
    there.mkdir()
    assert findings(vllm, ULTRA_PATCHES_RUN_DIR=str(there)) == []
    assert list(there.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "left"),
    [
        ({}, None),
        ({"ULTRA_PATCHES_RUN_DIR": "/"}, "ULTRA_PATCHES_RUN_DIR set"),
        ({"ULTRA_PATCHES": "strict", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "ULTRA_PATCHES"}, None),
        ({"ULTRA_PATCHES": "strict", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "A, ULTRA_"}, None),
        ({"ULTRA_PATCHES": "strict", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": ","}, "ULTRA_PATCHES set"),
    ],
)
def test_what_vllm_copies_to_its_ray_workers(vllm: Site, env: dict[str, str], left: str | None) -> None:
    vllm.write("ray.actor")
    found = [f for f in findings(vllm, **env) if f["check"] == "ray"]
    assert bool(found) is (left is not None)
    for finding in found:
        assert finding["what"].startswith(f"{left}, but")
        assert "export VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=ULTRA_PATCHES" in finding["do"]


def test_the_model_runner_is_told_from_our_targets(vllm: Site) -> None:
    _, severity, what, _ = only(findings(vllm, VLLM_USE_V2_MODEL_RUNNER="1"))
    assert (severity, what) == ("note", "VLLM_USE_V2_MODEL_RUNNER='1'")
    (inside,) = doctor.check_model_runner("1", {"vllm.v1.worker.gpu_model_runner", "vllm.meta"})
    (outside,) = doctor.check_model_runner("1", {"vllm.meta"})
    assert "vllm.v1.worker.gpu_model_runner may be code of the other runner" in inside.means
    assert "either runner gets the patches" in outside.means
