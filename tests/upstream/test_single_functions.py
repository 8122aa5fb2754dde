"""Patches of one function: the defect in the last release that has it, gone with the patch, back without it, and none after."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests.support import releases
from ultra_patches.core.ledger import entries
from ultra_patches.proving.verify import Run, run_patched, run_without

pytestmark = pytest.mark.upstream
ROOT = Path(__file__).parents[2]

KIMI, DOTS, HY = "vllm-kimi-linear-router-bias", "vllm-dots1-router-bias", "vllm-hy-v3-router-bias"
STREAMS, ALIGNMENT, EXPERTS = "vllm-nccl-packed-streams", "vllm-packed-alignment", "vllm-cpu-moe-prepack"
#: Which are needed, and what the probe says of those that are not.
NEEDED = {
    "0.16.0": {KIMI, DOTS, STREAMS, ALIGNMENT},
    "0.23.0": {KIMI, DOTS, HY, STREAMS, ALIGNMENT},
    "0.26.0": {KIMI, STREAMS, ALIGNMENT},
    "0.32.0": {STREAMS, ALIGNMENT, EXPERTS},
    "0.33.0": {ALIGNMENT, EXPERTS},
}
ALL = (KIMI, DOTS, HY, STREAMS, ALIGNMENT, EXPERTS)
ABSENT = {("0.16.0", HY), ("0.26.0", DOTS), *((r, i) for r in ("0.32.0", "0.33.0") for i in (KIMI, DOTS))}
CASES = [(release, patch_id) for release in NEEDED for patch_id in ALL]


@functools.cache
def probes(release: str, patched: bool) -> dict[str, Run]:
    environ = {
        "PYTHONPATH": os.pathsep.join([str(releases.tree("vllm", release)), str(ROOT)]),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    patches = [entries[patch_id].patch for patch_id in ALL]
    if not patched:
        return run_without(patches, environ=environ)
    return {patch_id: alone for patch_id, (alone, _) in run_patched(patches, None, environ=environ).items()}


@pytest.mark.parametrize(("release", "patch_id"), CASES)
def test_the_defect_shows_where_the_patch_is_needed(release: str, patch_id: str) -> None:
    run = probes(release, patched=False)[patch_id]
    wanted = "defect" if patch_id in NEEDED[release] else "absent" if (release, patch_id) in ABSENT else "clean"
    assert run.verdict == wanted, run.detail
    assert run.state == "disabled"


@pytest.mark.parametrize(("release", "patch_id"), CASES)
def test_it_is_gone_with_the_patch_and_nothing_is_set_elsewhere(release: str, patch_id: str) -> None:
    run = probes(release, patched=True)[patch_id]
    needed = patch_id in NEEDED[release]
    assert run.verdict == ("absent" if (release, patch_id) in ABSENT else "clean"), run.detail
    assert run.state == ("applied" if needed else "not-needed"), run.reason
