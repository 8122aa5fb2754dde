"""Optional targets are set where a release has them, and nothing is added to vLLM's Worker."""

from typing import Any

import pytest

from tests.support import Run, states
from ultra_patches.bias.compile_salt import patches_of

pytestmark = pytest.mark.upstream
RELEASES = ("0.16.0", "0.20.2", "0.22.1", "0.26.0", "0.28.0", "0.33.0")
WORKER = "vllm.v1.worker.gpu_worker:Worker"
TRANSFER = "vllm.distributed.weight_transfer"


def on(*releases: str) -> pytest.MarkDecorator:
    runs = [Run("tests/upstream/targets_case.py", (("vllm", release),)) for release in releases]
    return pytest.mark.parametrize("outcome", runs, indirect=True, ids=str)


@on(*RELEASES)
def test_nothing_is_bad_once_everything_is_imported(outcome: dict[str, Any]) -> None:
    assert not {"conflict", "failed", "drifted"} & set(states(outcome).values())
    assert len(outcome["applied"]) >= 9
    assert outcome["left"] == []


@on(*RELEASES)
def test_a_worker_has_no_name_more_than_upstreams(outcome: dict[str, Any]) -> None:
    """An extension of the user's whose method is called like one of ours would end the start of the engine."""
    patched, reverted = outcome["worker"]
    assert patched == reverted


@on(*RELEASES)
def test_the_worker_ends_a_session_that_fails(outcome: dict[str, Any]) -> None:
    found = outcome["applied"]["vllm-reload-abandoned-session"]
    assert f"{WORKER}.update_weights" in found
    assert f"{WORKER}.reload_weights" in found
    has_sessions = "finish_weight_update" in outcome["worker"][0]
    assert (f"{WORKER}.finish_weight_update" in found) is has_sessions


@on(*RELEASES)
def test_transports_say_whether_they_hand_over_copies(outcome: dict[str, Any]) -> None:
    found = outcome["applied"]["vllm-reload-receive-buffer"]
    assert f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine.receive_weights" in found
    ipc = f"{TRANSFER}.ipc_engine:IPCWeightTransferEngine.receive_weights"
    assert (ipc in found) is ("0.16.0" not in outcome["files"][0])


@on("0.16.0", "0.22.1", "0.26.0")
def test_the_compile_cache_knows_the_patches_that_change_what_is_traced(outcome: dict[str, Any]) -> None:
    salted = {i for i, keys in outcome["applied"].items() if "vllm.config.vllm:VllmConfig.compute_hash" in keys}
    assert salted
    assert all(patch_id.endswith("-router-bias") for patch_id in salted)
    hashes = dict(outcome["hashes"])
    now, left = hashes.pop("all"), set(salted)
    assert patches_of(now) == salted
    for patch_id, value in hashes.items():  # in the order in which they were reverted
        left.discard(patch_id)
        assert (value != now) is (patch_id in salted), "only they count"
        assert value.partition("+")[0] != now.partition("+")[0] or patch_id not in salted, "also where it is cut short"
        assert patches_of(value) == left
        now = value
    assert "+" not in now, "the key is upstream's own again"


@on("0.28.0", "0.33.0")
def test_the_key_is_upstreams_own_where_nothing_that_is_traced_changes(outcome: dict[str, Any]) -> None:
    assert len(set(outcome["hashes"].values())) == 1
    assert "+" not in outcome["hashes"]["all"]
