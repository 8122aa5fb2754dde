"""A real vLLM engine takes new weights in a session of several chunks and gives them back, on the CPU.

The example script runs once, in a fresh process; the tests read the log-probabilities that it printed.
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "2"}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def session() -> Iterator[dict[str, Any]]:
    """The script's JSON, with its exit status and whether it left processes behind added."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.weight_update_session", "--fresh", "--sensitivity", "--json"],
        cwd=ROOT,
        env={**ENVIRONMENT, **os.environ},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        # The reaper of an orphan may take a moment after the script itself has ended.
        deadline = time.monotonic() + 10
        while (left := _group_is_alive(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        printed: dict[str, Any] = json.loads(output)
        yield {**printed, "exit_status": process.returncode, "left_processes": left}
    finally:
        if _group_is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _flat(scores: list[list[float]]) -> list[float]:
    return [value for row in scores for value in row]


def test_log_probabilities_are_complete_and_finite(session: dict[str, Any]) -> None:
    for stage in ("before", "after", "back", "fresh"):
        assert [len(row) for row in session[stage]] == [5, 4, 39], stage
        assert all(math.isfinite(value) and value < 0 for value in _flat(session[stage])), stage


def test_session_changes_every_token(session: dict[str, Any]) -> None:
    pairs = list(zip(_flat(session["before"]), _flat(session["after"]), strict=True))
    assert all(before != after for before, after in pairs)


def test_session_equals_an_engine_started_on_the_new_weights(session: dict[str, Any]) -> None:
    assert session["after"] == session["fresh"]


def test_session_back_restores_the_first_values(session: dict[str, Any]) -> None:
    assert session["back"] == session["before"]


@pytest.mark.parametrize("parameter", ["A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias"])
def test_the_comparison_notices_a_mamba_parameter_left_old(session: dict[str, Any], parameter: str) -> None:
    assert session["sensitivity"][parameter] > 1e-3


def test_script_succeeds_and_ends_its_processes(session: dict[str, Any]) -> None:
    assert session["exit_status"] == 0
    assert not session["left_processes"]


# bf16 of an odd count, so that the fp32 and int64 tensors behind it lie at unaligned offsets.
ROUND_TRIP = """
import sys, torch
from pathlib import Path
from examples.cpu_transfer import SharedFileUpdateInfo, pack, unpack

sent = {
    "odd": torch.randn(3, 1).to(torch.bfloat16),
    "bias": torch.randn(5),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(4, 6, dtype=torch.float16).T,
}
path = Path(sys.argv[1], "chunk")
info = pack(path, sent)
received = dict(unpack(SharedFileUpdateInfo(**info)))
assert list(received) == list(sent)
for name, tensor in sent.items():
    assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor), name
pack(path, {"odd": torch.zeros(3, 1, dtype=torch.bfloat16)})
assert torch.equal(received["odd"], sent["odd"]), "a later chunk of the same path changed what was received"
try:
    unpack(SharedFileUpdateInfo(**info))
except ValueError as error:
    assert "bytes" in str(error)
else:
    raise AssertionError("a file of another size was read")
"""


def test_pack_and_unpack_round_trip(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", ROUND_TRIP, str(tmp_path)],
        cwd=ROOT,
        env={**ENVIRONMENT, **os.environ},
        check=True,
    )
