"""Parameter bytes of tiny models in vLLM on the CPU, as JSON.

    python -m tests.planning.vllm_case engines|models

`engines` are real ones, of one worker: bytes of each model that it loaded. `models` are vLLM's model classes on four gloo ranks,
for layouts that would take an engine each: (pipeline rank, bytes) of each rank. Weights are random: nothing is generated.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.planning.layout import Rollout
from tests.planning import forked
from tests.planning.tiny import MODELS, RANKS

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # EngineCore and worker in one process: each would import everything again.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ENGINES = [("nemotron without experts", Rollout(1)), ("glm", Rollout(1))]
LAYOUTS = [
    *[("nemotron", Rollout(4, tp, pp)) for tp, pp in ((1, 1), (2, 1), (2, 2), (1, 2))],
    ("nemotron", Rollout(4, 2, 1, expert_parallel=True)),
    ("nemotron of one group", Rollout(4, 2, 1)),
    *[("glm", Rollout(4, tp, pp)) for tp, pp in ((1, 1), (4, 1), (2, 2))],
    ("glm", Rollout(4, 4, 1, expert_parallel=True)),
    *[("qwen3", Rollout(4, tp, pp)) for tp, pp in ((4, 1), (1, 4))],
    *[("qwen3 tied", Rollout(4, tp, pp)) for tp, pp in ((2, 1), (1, 2))],
    ("qwen3 odd", Rollout(4, 2, 2)),
    ("qwen3-moe", Rollout(4, 2, 2)),
    ("deepseek", Rollout(4, 2, 2)),
]


def name(model: str, rollout: Rollout) -> str:
    return f"{model} tp{rollout.tp} pp{rollout.pp}" + " ep" * rollout.expert_parallel


def main() -> int:
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        for model, values in MODELS.items():
            (path := Path(folder, model)).mkdir()
            (path / "config.json").write_text(json.dumps(values))
        with contextlib.redirect_stdout(sys.stderr):
            seen = _engines(Path(folder)) if sys.argv[1:] == ["engines"] else _every_model(Path(folder))
    import vllm

    print(json.dumps({"seen": seen, "files": [vllm.__file__]}))
    return 0


def _engines(folder: Path) -> dict[str, list[int]]:
    import vllm  # noqa: F401 # before the forks

    return {name(*one): forked.run(1, lambda *_, one=one: _engine(folder, *one))[0] for one in ENGINES}


def _every_model(folder: Path) -> dict[str, list[list[int]]]:
    configs = _configs(folder)
    ranks = forked.run(RANKS, lambda rank, port: _models(configs, rank, port))
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


def _arguments(folder: Path, model: str, rollout: Rollout) -> dict[str, Any]:
    return {
        "model": str(folder / model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "tensor_parallel_size": rollout.tp,
        "pipeline_parallel_size": rollout.pp,
        "enable_expert_parallel": rollout.expert_parallel,
    }


def _engine(folder: Path, model: str, rollout: Rollout) -> list[int]:
    from vllm import LLM

    llm = LLM(
        worker_extension_cls="tests.planning.counted_worker.Count",
        **_arguments(folder, model, rollout) | {"distributed_executor_backend": "uni"},
    )
    try:
        return [size for worker in llm.collective_rpc("loaded_bytes") for size in worker]
    finally:
        llm.llm_engine.engine_core.shutdown()


def _allow_ungated_experts() -> None:
    """vLLM refuses NemotronH's experts on CPUs, for which it has no kernel. Here they only hold their weights."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    class Gpu:
        def __getattr__(self, asked: str) -> Any:
            return (lambda: True) if asked == "is_cuda_alike" else getattr(platform, asked)

    platform, config.current_platform = config.current_platform, Gpu()
    CPUUnquantizedExperts.is_supported_config = staticmethod(lambda *_: (True, None))


def _configs(folder: Path) -> list[Any]:
    """vLLM's configuration of each layout; the classes that they need are imported with them, once for all ranks."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_architecture

    found = []
    for model, rollout in LAYOUTS:
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(rollout.tp * rollout.pp), "LOCAL_RANK": "0"}
        arguments = _arguments(folder, model, rollout) | {"distributed_executor_backend": "external_launcher"}
        found.append(EngineArgs(**arguments).create_engine_config())
        get_model_architecture(found[-1].model_config)
    return found


def _models(configs: list[Any], rank: int, port: int) -> dict[str, list[int]]:
    """(pipeline rank, bytes) of this rank by layout."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from tests.planning.counted_worker import parameter_bytes

    _allow_ungated_experts()
    # vLLM's groups over shared memory wait for each other; ranks of different names do without.
    os.environ["VLLM_DIST_IDENT"] = f"planning-{rank}"
    seen = {}
    for (model, rollout), config in zip(LAYOUTS, configs, strict=True):
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            parallel_state.init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
            parallel_state.initialize_model_parallel(rollout.tp, rollout.pp)
            built = initialize_model(config)
        seen[name(model, rollout)] = [parallel_state.get_pp_group().rank_in_group, parameter_bytes(built)]
        parallel_state.destroy_model_parallel()
        del built
        gc.collect()
    return seen


if __name__ == "__main__":
    raise SystemExit(main())
