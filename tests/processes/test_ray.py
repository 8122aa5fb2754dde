"""A real Ray cluster: each worker process is armed, and the user's own hook and variables keep their effect."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ultra_patches.entrypoints.ray import runtime_env

ray: Any = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(60)

GET_S = 40
OFF_BY_DRIVER = "vllm-reload-numel-guard"
#: The driver says off and the hook takes it back: that has an effect only where ours comes after theirs.
HOOK_BODY = 'import os; os.environ.update(USER_HOOK_RAN="yes", ULTRA_PATCHES="warn")'
DRIVER = {
    "ULTRA_PATCHES": "off",
    "ULTRA_PATCHES_DISABLE": OFF_BY_DRIVER,
    "HF_HOME": "/drivers",
    "HF_HUB_OFFLINE": "1",
    "HF_TOKEN": "hf_not_asked_for",
    "VLLM_HOST_IP": "192.0.2.1",
}


def _callable_hook() -> Callable[[], None]:
    def hook() -> None:  # of a function's own, so that no worker can import it
        os.environ.update(USER_HOOK_RAN="yes", ULTRA_PATCHES="warn")

    return hook


@pytest.fixture(scope="module", params=["named", "callable"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("user")
    (folder / "users_hooks.py").write_text(f"def hook():\n    {HOOK_BODY}\n")
    given = {
        "env_vars": {"PYTHONPATH": str(folder), "HF_HOME": "/users"},
        "worker_process_setup_hook": "users_hooks.hook" if request.param == "named" else _callable_hook(),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in (*DRIVER, "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK"):
            patch.delenv(name, raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=80 * 2**20,
                runtime_env=runtime_env(given, {**DRIVER, "XDG_CACHE_HOME": str(folder / "cache")}),
            )
            yield
        finally:
            ray.shutdown()
    assert not ray.is_initialized()


def _reporter() -> Callable[[], dict[str, Any]]:
    def report() -> dict[str, Any]:  # of a function's own, so that the workers need no tests folder
        import os
        import sys

        loaded = sorted(sys.modules)  # before this function imports anything of ours
        import ultra_patches

        return {
            "pid": os.getpid(),
            "loaded": loaded,
            "states": {row.id: row.state.value for row in ultra_patches.status()},
            "pids": {row.pid for row in ultra_patches.status()},
            "env": dict(os.environ),
        }

    return report


def _check(worker: dict[str, Any]) -> None:
    assert worker["pid"] != os.getpid()
    assert worker["pids"] == {worker["pid"]}
    assert "ultra_patches" in worker["loaded"], "the hook imported it, not this test"
    assert not {"torch", "vllm", "megatron"} & set(worker["loaded"])
    env = worker["env"]
    assert env["USER_HOOK_RAN"] == "yes"
    assert worker["states"].pop(OFF_BY_DRIVER) == "disabled", "the driver's setting came along"
    assert worker["states"]
    assert "disabled" not in worker["states"].values(), "ours ran after the user's hook"
    assert (env["HF_HOME"], env["HF_HUB_OFFLINE"]) == ("/users", "1")
    assert env["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] == "ULTRA_PATCHES"
    assert not {"HF_TOKEN", "VLLM_HOST_IP"} & set(env)


def test_a_task_and_an_actor_are_armed(cluster: None) -> None:
    report = _reporter()

    class Actor:
        def report(self) -> dict[str, Any]:
            return report()

    actor = ray.remote(num_cpus=1)(Actor).remote()
    task = ray.remote(num_cpus=1)(report).remote()
    workers = ray.get([actor.report.remote(), task], timeout=GET_S)
    for worker in workers:
        _check(worker)
    assert workers[0]["pid"] != workers[1]["pid"]


def test_a_task_with_variables_of_its_own_is_armed_as_well(cluster: None) -> None:
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": {"OF_THE_TASK": "1"}})(_reporter())
    worker = ray.get(task.remote(), timeout=GET_S)
    assert worker["env"]["OF_THE_TASK"] == "1"
    _check(worker)
