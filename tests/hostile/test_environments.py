"""The user's program goes on as without the overlay, whatever the machine is like; what can be in force is in force.

Each program imports an upstream and starts a child process, in a fork of its own: without the overlay and with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import pythons

from .machines import FOREIGN, Machine

USERS = (0, FOREIGN) if os.geteuid() == 0 else (os.geteuid(),)
CASE = "environments_case.py"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="ultra-patches-hostile-"))
    try:
        made = Machine(root)
        hostile = root / "hostile"
        for package in ("vllm", "megatron", "megatron/core"):
            (hostile / "closed" / package).mkdir(parents=True)
        (hostile / "closed" / "ultra-patches" / "verdicts").mkdir(parents=True)
        for closed in ("vllm", "megatron", "ultra-patches"):
            (hostile / "closed" / closed).chmod(0o700)
        (hostile / "file").write_text("no folder")
        (hostile / "files").mkdir()
        everybody = hostile / "everybody"
        (everybody / "ultra-patches" / "verdicts").mkdir(parents=True)
        (everybody / "ultra-patches" / "verdicts").chmod(0o777)
        everybody.chmod(0o777)
        for name, content in {
            "bytes": b"\xff\xfe[ultra_patches.patches]",
            "garbage": b"[some.group]\nno table\n",
        }.items():
            folder = hostile / "metadata" / f"{name}-1.0.dist-info"
            folder.mkdir(parents=True)
            (folder / "entry_points.txt").write_bytes(content)
            (folder / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: \xff\n")
        yield made
    finally:
        shutil.rmtree(root)


def check(result: Mapping[str, Any], patches: set[str]) -> None:
    """With the overlay everything is as without; the same patches are in force wherever the file can be read."""
    for name, (without, seen) in result.items():
        assert seen is not None, f"{name}: the process ended"
        states = seen.pop("states", {})
        assert seen == without, name
        if name.endswith((" zeros", " not utf-8")):
            assert without["import"] in ("SyntaxError", "ValueError"), name  # no Python without the overlay either
        else:
            assert without["import"] == "ok", name
            expected = {patch: "failed" if name.endswith(" deep") else "applied" for patch in patches}
            assert {patch: states[patch] for patch in patches} == expected, name


@pytest.mark.parametrize("version", pythons.SUPPORTED)
def test_a_stub_of_an_upstream(machine: Machine, version: str, record_property: Any) -> None:
    python = machine.python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    result = machine.run(python, CASE, "bare", "warn", *map(str, USERS))
    assert len(result) == 27 * len(USERS)
    # Of each user one file that the parser gives up on: the state of its patch says so.
    record_property("tried", [len(result), len(USERS)])
    check(result, {"toy"})


@pytest.mark.parametrize(
    ("kind", "patches"),
    [("vllm", {"vllm-packed-alignment", "vllm-nccl-packed-streams"}), ("megatron", {"megatron-router-bias-fp32"})],
)
def test_a_real_upstream(machine: Machine, kind: str, patches: set[str], record_property: Any) -> None:
    python = machine.python("3.12")
    assert python is not None, "the stack needs Python 3.12"
    only = {"ULTRA_PATCHES_ONLY": ",".join(patches)}
    result = machine.run(python, CASE, kind, "warn", *map(str, USERS), real=True, env=only)
    assert len(result) == 4 * len(USERS)
    record_property("tried", [len(result), 0])
    check(result, patches)


def test_strict_mode_still_raises(machine: Machine) -> None:
    python = machine.python("3.12")
    assert python is not None, "the stack needs Python 3.12"
    result = machine.run(python, CASE, "bare", "strict", str(USERS[-1]))
    assert {seen["import"] for _, seen in result.values()} == {"UltraPatchesError"}
    assert {seen["start"] for _, seen in result.values()} == {"ok"}
