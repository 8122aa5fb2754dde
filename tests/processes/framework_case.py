"""Start the Ray actor in which a framework runs its vLLM engine, without the engine; print what each process has as JSON.

PYTHONPATH=<the framework's package> python framework_case.py skyrl | openrlhf
"""

import importlib
import json
import sys
from typing import Any

import ray

ENTRIES = {
    "skyrl": "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor",
    "openrlhf": "openrlhf.trainer.ray.vllm_engine",
}


def look() -> dict[str, Any]:
    """What this process has, once it has imported what an engine of vLLM imports."""
    overlay = sys.modules.get("ultra_patches")
    importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    importlib.import_module("vllm.model_executor.model_loader.reload")
    return {row.id: row.state.value for row in overlay.status()} if overlay else {}


def actor(framework: str) -> Any:
    """The framework's own class, whose `__init__` would start an engine on a GPU."""
    module: Any = importlib.import_module(ENTRIES[framework])
    skyrl = framework == "skyrl"
    server = module.VLLMServerActor if skyrl else module.RolloutRayActor.__ray_metadata__.modified_class

    class Probe(server):  # type: ignore[misc, valid-type] # the class is only known at run time
        def __init__(self) -> None:
            pass

        def seen(self) -> dict[str, Any]:
            return {"entry imported": ENTRIES[framework] in sys.modules, "status": look()}

    return ray.remote(Probe)


def main(framework: str) -> None:
    remote = actor(framework)
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=80 * 2**20, runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true"}},
    )  # fmt: skip
    try:
        worker = ray.get(remote.options(num_cpus=1, num_gpus=0).remote().seen.remote(), timeout=300)
    finally:
        ray.shutdown()
    print("\n" + json.dumps({"driver": look(), "worker": worker}))


if __name__ == "__main__":
    main(sys.argv[1])
