"""A real vLLM engine and a Ray actor write to one folder: one digest, and one without the overlay is named."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
ROOT = Path(__file__).parents[2]
SESSION = ("-m", "examples.weight_update_session")
IN_RAY = """
import ray
from ultra_patches.entrypoints.ray import runtime_env

ray.init(
    address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
    object_store_memory=80 * 2**20, runtime_env=runtime_env(),
)

@ray.remote(num_cpus=1)
class Rollout:
    def look(self):
        import vllm.model_executor.model_loader.reload, vllm.distributed.weight_transfer.ipc_engine
        import ultra_patches
        return [row.state.value for row in ultra_patches.status() if row.id == "vllm-reload-keep-unsent"]

print(ray.get(Rollout.remote().look.remote()))
ray.shutdown()
"""


def start(*command: str, **env: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ULTRA_PATCHES", "VLLM_PLUGINS"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env={**kept, "VLLM_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0", **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def report(folder: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "ultra_patches", "status", "--run-dir", str(folder), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    data: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, data


def test_an_engine_and_a_ray_actor_have_one_digest(tmp_path: Path) -> None:
    start(*SESSION, ULTRA_PATCHES_RUN_DIR=str(tmp_path))
    assert "applied" in start("-c", IN_RAY, ULTRA_PATCHES_RUN_DIR=str(tmp_path))
    code, data = report(tmp_path)
    users = [process for process in data["processes"] if "vllm" in process["imported"]]
    roles = {process["role"] for process in users}
    assert any("EngineCore" in role for role in roles), roles
    assert any("Worker" in role for role in roles), roles
    assert any("weight_update_session" in role for role in roles), roles
    assert any("ray::" in role for role in roles), roles
    assert len(users) >= 4
    assert len(data["groups"]["vllm"]) == 1, data["problems"]
    assert (code, data["problems"]) == (0, [])


def test_an_engine_without_the_plug_in_is_named(tmp_path: Path) -> None:
    """The import stands where only the driver comes by: multiprocessing gives the engine's processes the file without it."""
    script = tmp_path / "driver.py"
    script.write_text(
        "if __name__ == '__main__':\n"
        f"    import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "    from examples import weight_update_session; raise SystemExit(weight_update_session.main([]))\n"
    )
    folder = tmp_path / "run"
    start(str(script), ULTRA_PATCHES_RUN_DIR=str(folder), VLLM_PLUGINS="")
    code, data = report(folder)
    assert code == 1
    (problem,) = data["problems"]
    assert "(EngineCore), started by pid" in problem
    assert "left no file" in problem
    assert "ultra-patches doctor" in problem


def test_a_process_in_which_it_is_off_is_named(tmp_path: Path) -> None:
    """The engine has it, and the trainer beside it was started with ULTRA_PATCHES=off."""
    start(*SESSION, ULTRA_PATCHES_RUN_DIR=str(tmp_path))
    load = "import os, ultra_patches, vllm.model_executor.model_loader.reload\nprint(os.getpid())"
    pid = start("-c", load, ULTRA_PATCHES_RUN_DIR=str(tmp_path), ULTRA_PATCHES="off").split()[-1]
    code, data = report(tmp_path)
    assert code == 1
    assert data["problems"]
    assert all(f"pid {pid} " in problem for problem in data["problems"]), data["problems"]
