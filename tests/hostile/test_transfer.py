"""A weight transfer in which one rank fails, or in which a message is not as it should be: real gloo ranks, a real worker."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.transfer_case import MESSAGES, SCENARIOS, WAIT_S
from tests.support import releases

pytestmark = pytest.mark.upstream
RELEASE = "0.33.0"
#: Ranks on a loaded machine need a while; the group's time-out is six times as long.
AT_ONCE_S = 10.0
#: What goes through as released: the ranks on one GPU both say that they have sent, and one of them has not.
UNSEEN = ("one GPU", "packed: one GPU")


@functools.cache
def case() -> dict[str, Any]:
    tree = releases.tree("vllm", RELEASE)
    project = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(project)]),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("transfer_case.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    data: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return data


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "killed"])
def test_every_rank_ends_at_once_and_is_told_who_failed_and_why(name: str) -> None:
    culprit, reason, _ = SCENARIOS[name]
    ended = case()["ranks"]["with"][name]
    assert [rank for rank, *_ in ended] == [0, 1]
    for rank, kind, said, seconds, _ in ended:
        assert kind, f"rank {rank} does not know"
        assert reason in said
        assert f"rank {culprit}: " in said or culprit < 0, said
        assert seconds < AT_ONCE_S


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "killed"])
def test_as_released_a_rank_waits_for_the_time_out_or_is_told_nothing(name: str) -> None:
    ended = case()["ranks"]["without"][name]
    if name in UNSEEN:
        assert [kind for _, kind, *_ in ended] == ["", ""]
    else:
        assert max(seconds for *_, seconds, _ in ended) > WAIT_S["without"] * 0.9


@pytest.mark.parametrize("name", [name for name, (rank, *_) in SCENARIOS.items() if rank >= 0 and name != "killed"])
def test_the_rank_that_fails_raises_its_own_error(name: str) -> None:
    culprit = SCENARIOS[name][0]
    kinds = {mode: case()["ranks"][mode][name][culprit][1] for mode in ("with", "without")}
    if name != "name is bytes":  # as released such a name is not seen on this rank
        assert kinds["with"] == kinds["without"]


def test_a_rank_that_is_killed_ends_the_other_at_once() -> None:
    for mode in ("with", "without"):
        ((rank, kind, said, seconds, _),) = case()["ranks"][mode]["killed"]
        assert (rank, kind) == (0, "RuntimeError")
        assert seconds < AT_ONCE_S
        assert ("rank 0 lost another rank in a weight transfer" in said) is (
            mode == "with" and sys.version_info >= (3, 11)
        )


def test_what_is_wrong_with_a_message_is_a_clear_error_before_anything_is_loaded(record_property: Any) -> None:
    found = case()["messages"]["with"]
    record_property("tried", [MESSAGES, MESSAGES - found["counts"]["right"]])
    assert found["unclear"] == []
    assert set(found["counts"]) == {"right", "clear error", "refused by vLLM when it is read"}
    assert sum(found["counts"].values()) == MESSAGES
    assert min(found["counts"].values()) > 10, "the messages are of every kind"


def test_as_released_wrong_weights_are_loaded_and_errors_name_no_rank() -> None:
    counts = case()["messages"]["without"]["counts"]
    assert counts["wrong weights"] > 0
    assert counts["other error"] > 20
