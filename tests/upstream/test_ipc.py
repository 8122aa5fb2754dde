"""Transfers between real trainer and worker engines of every family, several gloo ranks, ranks that differ."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import releases

pytestmark = pytest.mark.upstream
HERE = Path(__file__).parent
#: One release of each family, and the two latest.
RELEASES = ("0.18.1", "0.21.0", "0.22.1", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
NO_GATHER = ("0.18.1", "0.21.0")
DIFFER = ("order", "shape", "fewer", "more", "chunks", "nchunks", "three", "none", "dtypes")
FAULTS = ("twice", "misaligned", "raises")
#: What a release as it is gets right by luck: an unpacked handle carries its shape.
LUCKY = {"shape:unpacked", "chunks:unpacked"}


def words(release: str, names: tuple[str, ...]) -> list[str]:
    modes = ("unpacked",) if release in NO_GATHER else ("unpacked", "packed")
    return [f"{name}:{mode}" for name in names for mode in modes]


@functools.cache
def case(release: str, overlay: str, scenarios: tuple[str, ...]) -> dict[str, Any]:
    tree = releases.tree("vllm", release)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(HERE.parent.parent)]),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", str(HERE / "ipc_case.py"), overlay, *scenarios]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    data: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert data["file"].startswith(str(tree)), "the case ran on another vLLM"
    return data


def patched(release: str) -> dict[str, Any]:
    return case(release, "on", tuple(words(release, ("same", *DIFFER, *FAULTS))))


def unpatched(release: str) -> dict[str, Any]:
    return case(release, "off", tuple(words(release, ("same", "order", "chunks", "shape"))))


@pytest.mark.parametrize("release", RELEASES)
def test_every_worker_gets_what_the_rank_on_its_gpu_sent(release: str) -> None:
    data = patched(release)
    assert data["status"]["vllm-ipc-rank-layout"] == "applied"
    for word in words(release, ("same", *DIFFER)):
        got = data["results"][word]
        assert got["wrong"] == [], word
        assert not any(got["errors"]), word
        assert not any(got["trainers"]), word


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_as_it_is_has_the_defect(release: str) -> None:
    data = unpatched(release)
    for word in words(release, ("order", "chunks", "shape")):
        got = data["results"][word]
        damage = got["wrong"] or any(got["errors"]) or any(got["trainers"])
        assert bool(damage) is (word not in LUCKY or release in NO_GATHER), word


@pytest.mark.parametrize("release", [r for r in RELEASES if r not in NO_GATHER])
def test_the_defect_is_silent_where_handles_are_gathered(release: str) -> None:
    for mode in ("unpacked", "packed"):
        got = unpatched(release)["results"][f"order:{mode}"]
        assert got["wrong"]
        assert not any(got["errors"])
        assert not any(got["trainers"])


@pytest.mark.parametrize("release", [r for r in RELEASES if r not in NO_GATHER])
def test_where_ranks_agree_the_wire_is_what_upstream_sends(release: str) -> None:
    for mode in ("unpacked", "packed"):
        ours, theirs = (d["results"][f"same:{mode}"]["messages"] for d in (patched(release), unpatched(release)))
        assert len(theirs) == (1 if mode == "unpacked" else 2)
        assert json.dumps(ours) == json.dumps(theirs)


@pytest.mark.parametrize("release", RELEASES)
def test_a_worker_without_the_overlay_fails_before_it_loads_anything(release: str) -> None:
    names = ("order", "three", "nchunks")
    data = case(release, "worker-off", tuple(words(release, names)))
    for word in words(release, names):
        got = data["results"][word]
        assert all(got["errors"]), word
        assert all(got["trainers"]), word
        assert got["received"] == [0] * len(got["received"]) or word.startswith("nchunks"), word
        assert not [w for w in got["wrong"] if ": no " not in w], f"garbage loaded in {word}"


@pytest.mark.parametrize("release", RELEASES)
def test_a_worker_without_the_overlay_still_understands_ranks_that_agree(release: str) -> None:
    data = case(release, "worker-off", tuple(words(release, ("same",))))
    for got in data["results"].values():
        assert (got["wrong"], any(got["errors"]), any(got["trainers"])) == ([], False, False)


@pytest.mark.parametrize("release", RELEASES)
def test_equal_layouts_are_sent_once(release: str) -> None:
    (message, *_) = patched(release)["results"]["three:unpacked"]["messages"]
    assert len(message["names"]) == 2
    assert message["names"][0]["ranks"] == {"GPU-0": "0", "GPU-2": "2"}
    assert message["names"][1]["ranks"] == {"GPU-1": "1"}


@pytest.mark.parametrize("release", RELEASES)
def test_a_name_sent_twice_is_an_error_that_names_it(release: str) -> None:
    got = patched(release)["results"]["twice:unpacked"]
    assert "rank 1 on GPU GPU-1: a is sent twice" in got["errors"][1]
    assert all("a is sent twice" in line for line in got["trainers"]), "every rank is told"


@pytest.mark.parametrize("release", [r for r in RELEASES if r not in NO_GATHER])
def test_an_offset_that_does_not_fit_the_dtype_arrives(release: str) -> None:
    """With `vllm-packed-alignment`; without it torch refuses to view fp32 at byte 6."""
    for word in ("misaligned:packed", "misaligned:unpacked"):
        got = patched(release)["results"][word]
        assert (got["wrong"], got["errors"]) == ([], [None, None]), word


@pytest.mark.parametrize("release", RELEASES)
def test_a_rank_whose_exporter_fails_stops_every_rank(release: str) -> None:
    for word in words(release, ("raises",)):
        got = patched(release)["results"][word]
        others, own = got["trainers"]
        assert others == "RuntimeError: weight transfer stopped on every rank: rank 1: RuntimeError: exporter broke"
        assert own == "RuntimeError: exporter broke", "its own error, as without the overlay"
