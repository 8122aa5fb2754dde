"""Build every case with Megatron-Bridge on four gloo ranks and print what each rank holds, as JSON.

    python -m tests.planning.megatron_case

The ranks are forked after the imports, which take longer than the rest.
"""

import gc
import json
import logging
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from tests.planning import forked
from tests.planning.tiny import CASES, MODELS, RANKS, Case
from tests.support import te_layers


def main() -> int:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    te_layers.prepare()
    import megatron.bridge
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import transformer_block

    # Without transformer-engine core takes torch's norm here, which refuses sequence parallelism. Both hold one scale.
    transformer_block.LayerNormImpl = transformer_engine.TENorm

    with tempfile.TemporaryDirectory() as folder:
        ranks = forked.run(RANKS, lambda rank, port: _rank(Path(folder), rank, port))
    seen = {str(case): [rank[index] for rank in ranks] for index, case in enumerate(CASES)}
    print(json.dumps({"seen": seen, "files": [megatron.bridge.__file__, transformer_block.__file__]}))
    return 0


def _rank(folder: Path, rank: int, port: int) -> list[dict[str, Any]]:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    seen = []
    for index, case in enumerate(CASES):
        # Groups of an earlier case would keep their threads.
        dist.init_process_group("gloo", store=dist.PrefixStore(str(index), store), rank=rank, world_size=RANKS)
        try:
            seen.append(_build(case, folder / f"{rank}-{index}"))
        except Exception as error:
            error.add_note(f"case {case}, rank {rank}")
            raise
        dist.barrier()
        dist.destroy_process_group()
    return seen


def _build(case: Case, folder: Path) -> dict[str, Any]:
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from transformers import AutoConfig

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[case.model]))
    provider = AutoBridge.from_hf_config(AutoConfig.from_pretrained(folder)).to_megatron_provider(load_weights=False)
    te_layers.use(provider, torch.bfloat16)
    if isinstance(spec := getattr(provider, "transformer_layer_spec", None), partial):
        # Bridge's GLM and DeepSeek ask for transformer-engine's layers only where it can be imported.
        provider.transformer_layer_spec = partial(spec.func, use_transformer_engine=True)
    sizes = case.trainer
    provider.tensor_model_parallel_size = sizes.tp
    provider.pipeline_model_parallel_size = sizes.pp
    provider.expert_model_parallel_size = sizes.ep
    provider.expert_tensor_parallel_size = sizes.etp
    provider.sequence_parallel = sizes.tp > 1 and sizes.ep > 1
    provider.should_pad_vocab = sizes.pad_vocab
    if sizes.lora:
        _adapt(provider, sizes.lora)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    models = provider.provide_distributed_model(ddp_config=ddp, bf16=True)
    seen = {"stage": parallel_state.get_pipeline_model_parallel_rank()} | _sizes(models)
    parallel_state.destroy_model_parallel()
    # The next model may have another attention backend.
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    del models
    gc.collect()
    return seen


def _adapt(provider: Any, lora: Any) -> None:
    from megatron.bridge.peft.lora import LoRA

    adapter = LoRA(target_modules=list(lora.targets), dim=lora.dim, share_expert_adapters=lora.share_expert_adapters)
    provider.register_pre_wrap_hook(lambda models: adapter(models, training=True))


def _sizes(models: list[Any]) -> dict[str, Any]:
    """Elements and bytes of this rank, adapters apart; of the optimizer as it is after a first step."""
    found = dict.fromkeys(
        ("dense", "experts", "dense_adapters", "expert_adapters", "weights", "gradients", "trained tensors"), 0
    )
    for model in models:
        for name, parameter in model.named_parameters():
            kind = "adapters" if ".adapter." in name else ""
            routed = not getattr(parameter, "allreduce", True)
            key = ("expert_" if routed else "dense_") + kind if kind else "experts" if routed else "dense"
            found[key] += parameter.numel()
            found["weights"] += parameter.nbytes
            found["trained tensors"] += parameter.requires_grad
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            found["gradients"] += buffer.numel_unpadded * buffer.grad_data.element_size()
    return found | {"optimizer": _optimizer(models)}


def _optimizer(models: list[Any]) -> int:
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from examples.grpo import plain_layers

    config = OptimizerConfig(
        optimizer="adam", lr=1.0, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(config, models)
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter in (one for group in part.optimizer.param_groups for one in group["params"]):
            total += parameter.nbytes
    for state in plain_layers.adam_states(optimizer):
        total += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    return total


if __name__ == "__main__":
    raise SystemExit(main())
