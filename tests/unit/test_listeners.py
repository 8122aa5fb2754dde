"""Who asks is told what changed; the run directory's writer is one of them, and comes back when the process is armed anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from ultra_patches.report import run_dir as run_report

from .site_dir import Site
from .stub import META

#: `told` holds the state of the patch each time that the listener is called.
LISTENS = """
import ultra_patches
from ultra_patches.core import overlay
told, stopped = [], []
def changed():
    told.append(row("toy")["state"])
    {body}
overlay.disarm()
overlay.listen(changed, lambda: stopped.append(True))
overlay.arm()
"""


@pytest.fixture
def vllm(site: Site) -> Site:
    site.write(META, "def f():\n    return 'upstream'\n")
    site.distribution("vllm", "0.20.0")
    site.declare("toy = declare('toy', (META, 'f'))\nknown('affected', toy)", "toy")
    return site


def test_a_listener_is_told_of_arming_of_imports_of_setting_and_of_reverting(vllm: Site) -> None:
    code = LISTENS.format(body="return None") + (
        f"import vllm, {META}\nultra_patches.revert('toy')\noverlay.disarm()\nimport vllm.other\nreport([told, stopped])"
    )
    vllm.write("vllm.other")
    told, stopped = vllm.ask(code)
    assert told == ["armed", "armed", "applied", "reverted"]
    assert stopped == [True]


def test_what_a_listener_says_is_a_warning_once(vllm: Site) -> None:
    ended = vllm.run(LISTENS.format(body="return 'the disk is full'") + f"import {META}\nreport(told)")
    assert ended.value == ["armed", "armed", "applied"]
    assert ended.stderr.count("the disk is full") == 1


@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_a_listener_that_raises_ends_no_import(vllm: Site, mode: str) -> None:
    code = LISTENS.format(body="raise OSError('gone')") + f"import {META}\nreport(told)"
    ended = vllm.run(code, env={"ULTRA_PATCHES": mode})
    assert ended.value == ["armed", "armed", "applied"]
    assert "changed failed (OSError: gone)" in ended.stderr


def test_without_a_run_directory_nothing_of_it_is_imported(vllm: Site, tmp_path: Path) -> None:
    code = f"import sys, ultra_patches, {META}\nreport('ultra_patches.run_dir' in sys.modules)"
    assert vllm.ask(code) is False
    assert vllm.ask(code, env={"ULTRA_PATCHES_RUN_DIR": str(tmp_path / "run")}) is True


def test_arming_again_keeps_one_writer_and_disarming_stops_it(vllm: Site, tmp_path: Path) -> None:
    values = vllm.ask(
        f"""
        import importlib, os, ultra_patches, {META}
        from multiprocessing.process import BaseProcess
        from ultra_patches.core import overlay
        from ultra_patches.run_dir import children, writer
        importlib.reload(ultra_patches)
        kept = len(writer._kept), len(overlay._listeners), BaseProcess.start is children._original
        overlay.disarm()
        report([*kept, len(writer._kept), len(overlay._listeners), BaseProcess.start is children._original])
        """,
        env={"ULTRA_PATCHES_RUN_DIR": str(tmp_path / "run")},
    )
    assert values == [1, 1, False, 0, 0, True]
    (process,) = run_report.read(tmp_path / "run").processes
    assert process.patches["toy"][1] == "applied", "what was written stays"


def test_a_hook_of_ray_that_turns_the_overlay_on_leaves_a_writer(vllm: Site, tmp_path: Path) -> None:
    vllm.write("their_hooks", "import os\n\ndef on():\n    os.environ['ULTRA_PATCHES'] = 'warn'\n")
    folder = tmp_path / "run"
    vllm.start(
        "-c",
        f"from ultra_patches.entrypoints import ray\nray.setup()\nimport os, {META}\nos.kill(os.getpid(), 9)",
        env={
            "ULTRA_PATCHES": "off",
            "ULTRA_PATCHES_RAY_USER_HOOK": "their_hooks.on",
            "ULTRA_PATCHES_RUN_DIR": str(folder),
        },
    )
    (process,) = run_report.read(folder).processes
    assert process.patches["toy"][1] == "applied"


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_command_of_the_overlay_is_no_process_of_the_run(vllm: Site, tmp_path: Path, command: str) -> None:
    vllm.start("-m", "ultra_patches", command, env={"ULTRA_PATCHES_RUN_DIR": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()
