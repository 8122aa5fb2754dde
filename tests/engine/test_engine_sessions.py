"""Sessions that do not go by the book, on a real engine: the weights are the right ones, whatever was sent how.

Compared are log-probabilities with those of an engine that was started on the same checkpoint, to the last bit. Once with what
is installed, and once with the sources of the newest release over the installed compiled operators, which it still runs with.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import releases

TIMEOUT_S = 900
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
#: What each stage must equal, by its first word.
RIGHT = {"old": "old, fresh", "new": "new, fresh", "mixed": "mixed, whole"}
STAGES = (
    "old, fresh", "new, reversed", "old, a call each", "new, everything twice", "new, twice in a row",
    "old, failed at the first call", "new, failed and retried", "mixed, partial", "mixed, whole", "new, fresh",
    "new, atomic session failed half-way", "old, atomic", "new, back and forth",
)  # fmt: skip


@pytest.fixture(scope="module", params=["installed", "0.33.0"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = []
    if request.param != "installed":
        path = [str(releases.with_operators(request.param, tmp_path_factory.mktemp("engine")))]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sessions_case.py"))],
        env={
            "OMP_NUM_THREADS": "2",
            **os.environ,
            "PYTHONWARNINGS": "default::UserWarning",
            "VLLM_TARGET_DEVICE": "cpu",
            "PYTHONPATH": os.pathsep.join([*path, str(Path(__file__).parents[2])]),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert path == [] or result["vllm"].startswith(path[0]), result["vllm"]
    return {**result, "stderr": done.stderr}


def test_nothing_was_left_out(case: dict[str, Any]) -> None:
    assert tuple(case["seen"]) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_those_of_a_fresh_engine(case: dict[str, Any], stage: str) -> None:
    assert case["seen"][stage] == case["seen"][RIGHT[stage.partition(",")[0]]]


def test_the_checkpoints_and_their_mixture_can_be_told_apart(case: dict[str, Any]) -> None:
    shown = [case["seen"][stage] for stage in RIGHT.values()]
    assert all(one != other for number, one in enumerate(shown) for other in shown[number + 1 :])


@pytest.mark.parametrize("session", ["first call", "half-way", "atomic"])
def test_a_failed_session_tells_the_caller_what_happened(case: dict[str, Any], session: str) -> None:
    assert "No such file or directory" in case["errors"][session]


def test_a_session_that_failed_half_way_says_that_the_model_is_mixed_and_what_to_do(case: dict[str, Any]) -> None:
    said = [line for line in case["stderr"].splitlines() if "update_weights failed (FileNotFoundError)" in line]
    assert any("the model is mixed" in line and "in a new session" in line for line in said), said
    assert sum("the model is mixed" in line for line in said) == 1, "not where nothing had been taken"
