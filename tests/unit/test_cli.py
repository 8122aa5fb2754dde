"""The command line where no upstream is installed: what it prints and how it exits."""

from __future__ import annotations

import json
import re

import pytest

from .site_dir import Ended, Site

ID = "vllm-reload-numel-guard"


def call(site: Site, *arguments: str, **env: str) -> Ended:
    return site.start("-m", "ultra_patches", *arguments, env=env)


def test_no_upstream_is_there(site: Site) -> None:
    found = site.ask("""
        import importlib.util
        report([name for name in ("vllm", "megatron", "torch", "ray") if importlib.util.find_spec(name)])
    """)
    assert found == []


def test_status_as_json(site: Site) -> None:
    ended = call(site, "status", "--json")
    assert (ended.code, ended.stderr) == (0, "")
    data = json.loads(ended.stdout)
    assert (data["schema"], data["kind"], data["upstreams"]) == (1, "status", [])
    assert len(data["patches"]) >= 8
    assert {row["state"] for row in data["patches"]} == {"not-installed"}
    assert {row["reason"] for row in data["patches"]} <= {
        f"{name} is not installed" for name in ("vllm", "megatron-core", "megatron-bridge")
    }


def test_status_for_people(site: Site) -> None:
    ended = call(site, "status")
    assert (ended.code, ended.stderr) == (0, "")
    assert re.search(rf"^{ID} .*not-installed", ended.stdout, re.MULTILINE)


def test_status_names_an_upstream_that_metadata_and_tree_disagree_on(site: Site) -> None:
    site.write("vllm._version", "version = '0.18.0'\n")
    site.distribution("vllm", "0.20.0")
    site.declare("toy = declare('toy', ('vllm.meta', 'f'))\nknown('unaffected', toy)", "toy")
    ended = call(site, "status")
    assert "vllm 0.20.0 is installed, but vllm 0.18.0 at" in ended.stderr
    (upstream,) = json.loads(call(site, "status", "--json").stdout)["upstreams"]
    assert "check PYTHONPATH" in upstream["conflict"]


def test_status_fails_where_a_patch_is_drifted(site: Site) -> None:
    site.write("vllm.meta", "def f():\n    pass\n")
    site.declare("toy = declare('toy', ('vllm.meta', 'f'))", "toy")
    ended = call(site, "status", "--json")
    assert ended.code == 1
    assert next(row["state"] for row in json.loads(ended.stdout)["patches"] if row["id"] == "toy") == "drifted"


def test_explain(site: Site) -> None:
    ended = call(site, "explain", ID)
    assert (ended.code, ended.stderr) == (0, "")
    for shown in (ID, "get_numel_loaded", "https://github.com/vllm-project/vllm/pull/44814", "goes when"):
        assert shown in ended.stdout


def test_verify_where_nothing_is_installed(site: Site) -> None:
    ended = call(site, "verify", ID, "--json")
    assert (ended.code, ended.stderr) == (0, "")
    (row,) = json.loads(ended.stdout)["patches"]
    assert (row["verdict"], row["without"]) == ("not installed", None)


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_an_unknown_id_is_one_line_that_names_the_nearest(site: Site, command: str) -> None:
    ended = call(site, command, "vllm-reload-numel-gard")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "ultra-patches: no patch is called 'vllm-reload-numel-gard' (did you mean vllm-reload"
    )
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("stat",), ("explain",), ("status", "--xml")])
def test_input_that_means_nothing(site: Site, arguments: tuple[str, ...]) -> None:
    ended = call(site, *arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert "usage: ultra-patches" in ended.stderr


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ({"ULTRA_PATCHES": "stict"}, "did you mean strict?"),
        ({"ULTRA_PATCHES_DISABLE": "vllm-reload-numel-gard"}, f"did you mean {ID}"),
        ({"ULTRA_PATCHES_ONLY": "vllm-reload-numel-gard"}, f"did you mean {ID}"),
        ({"ULTRA_PATCHES": "strict", "ULTRA_PATCHES_ONLY": "vllm-reload-numel-gard"}, f"did you mean {ID}"),
    ],
    ids=["mode", "disable", "only", "strict"],
)
def test_a_setting_that_means_nothing_is_one_line(site: Site, variable: dict[str, str], said: str) -> None:
    ended = call(site, "status", **variable)
    assert (ended.code, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_in_strict_mode_the_status_is_still_shown(site: Site) -> None:
    """Strict mode ends the program of whoever trains; the command that says why must go on."""
    site.write("vllm.meta", "def f():\n    pass\n")
    site.declare("toy = declare('toy', ('vllm.meta', 'f'))", "toy")
    ended = call(site, "status", "--json", ULTRA_PATCHES="strict")
    assert (ended.code, ended.stderr) == (1, "")
    assert "drifted" in ended.stdout


def test_version_and_help(site: Site) -> None:
    assert call(site, "--version").stdout.startswith("ultra-patches 0.")
    assert "status" in call(site, "--help").stdout


def test_the_console_script_is_the_same_function(site: Site) -> None:
    ended = site.start("-c", "import sys\nfrom ultra_patches.cli import main\nsys.exit(main(['status', '--json']))")
    assert ended.code == 0
    assert json.loads(ended.stdout)["kind"] == "status"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_is_no_traceback(site: Site, unbuffered: str) -> None:
    ended = site.start(
        "-c",
        "import os, subprocess, sys\n"
        "read, write = os.pipe()\nos.close(read)\n"
        "done = subprocess.run([sys.executable, '-S', '-m', 'ultra_patches', 'status', '--json'],"
        " stdout=write, stderr=subprocess.PIPE, text=True)\n"
        "print(done.stderr)\n",
        env={"PYTHONUNBUFFERED": unbuffered},
    )
    assert ended.stdout.strip() == ""
