"""Adapt tiny models by Megatron-Bridge's LoRA on the ranks of `torch.distributed.run`, and write what Bridge makes of them.

    python -m torch.distributed.run --nproc-per-node 2 tests/lora/lora_case.py FOLDER '{"dense": {"model": "qwen3", "tensor": 2}}'

Each named case gets a folder in FOLDER: `base` (Hugging Face), `checkpoint` (torch_dist and its run_config.yaml), `merged`
(Bridge's merged export), `bridge` (Bridge's own adapter folder), and where it is asked for `in_place` (adapters merged into
each rank's own weights first, which are then exported as any weights are).
"""

import json
import logging
import os
import sys
import warnings
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.grpo import plain_layers
from tests.support import te_layers

ALPHA, DROPOUT = 8, 0.1
EVERYTHING = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]


@dataclass(frozen=True)
class Case:
    """A model, the sizes of its groups of ranks, Bridge's LoRA, and what goes into the checkpoint."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    lora: dict[str, Any] = field(default_factory=dict)
    canonical: bool = False
    #: Of the checkpoint, as `sharded_state_dict` takes it.
    metadata: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    bf16: bool = False
    in_place: bool = False
    #: Core's own layers, as the GRPO example has them, in place of the stand-ins for transformer-engine's.
    plain: bool = False
    #: Of NemotronH, a letter a layer; of the others.
    pattern: str = "M*-E"
    head_dim: int = 8

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the adapters and the export."""
        return torch.bfloat16 if self.bf16 else torch.float32


def main() -> None:
    root, cases = Path(sys.argv[1]), {name: Case(**spec) for name, spec in json.loads(sys.argv[2]).items()}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    te_layers.prepare()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state

    for name, case in cases.items():
        folder = root / name
        if dist.get_rank() == 0:
            (folder / "checkpoint").mkdir(parents=True)
            _base(case, folder / "base")
        dist.barrier()
        _run(case, folder)
        dist.barrier()
        parallel_state.destroy_model_parallel()
        # Megatron keeps a model's attention kernels there, and refuses others in one process.
        for variable in [key for key in os.environ if key.startswith("NVTE_")]:
            del os.environ[variable]
    dist.destroy_process_group()


def _base(case: Case, folder: Path) -> None:
    import transformers

    from examples import tiny_nemotron_h
    from examples.grpo import cpu_preset

    if case.model == "nemotron_h":
        tiny_nemotron_h.save(folder, pattern=case.pattern, conv_kernel=4)
        return
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        # The heads make 256 channels of 64 hidden ones.
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": case.head_dim,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = {
        "qwen3": lambda: transformers.Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **sizes, **experts, num_experts=4, architectures=["Qwen3MoeForCausalLM"]
        ),
        "glm4_moe": cpu_preset.config,
    }[case.model]()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(case.dtype).save_pretrained(folder)


def _run(case: Case, folder: Path) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA

    kind = CanonicalLoRA if case.canonical else LoRA
    options = {"target_modules": EVERYTHING} if not case.canonical else {}
    lora = kind(**options | {"dim": 4, "alpha": ALPHA, "dropout": DROPOUT} | case.lora)
    bridge = AutoBridge.from_hf_pretrained(str(folder / "base"), torch_dtype=case.dtype)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = case.tensor
    provider.pipeline_model_parallel_size = case.pipeline
    provider.expert_model_parallel_size = case.expert
    provider.expert_tensor_parallel_size = 1
    te_layers.use(provider, case.dtype)
    if case.plain:
        plain_layers.prepare()
        plain_layers.use(provider)
    provider.finalize()

    def adapt(models: Any) -> Any:
        adapted = lora(models, training=True)
        lora.set_params_to_save(adapted)
        return adapted

    provider.register_pre_wrap_hook(adapt)
    provider.initialize_model_parallel(seed=0)
    models = provider.provide_distributed_model(wrap_with_ddp=False)
    _train(models[0])
    _export(bridge, models, lora, case, folder)


def _train(model: torch.nn.Module) -> None:
    """Values that a rank gives its own adapters; replicas get the same. Large enough to matter, B is zero else."""
    from megatron.core import parallel_state as groups

    for name, weight in model.named_parameters():
        if ".adapter." not in name:
            continue
        # linear_in of a row-parallel layer, and linear_out of each, are split over tensor-parallel ranks.
        ranks = [groups.get_pipeline_model_parallel_rank()]
        if getattr(weight, "tensor_model_parallel", False):
            ranks += [groups.get_tensor_model_parallel_rank()]
        if weight.dim() == 3 or ".local_experts." in name:
            ranks += [groups.get_expert_model_parallel_rank()]
        seed = zlib.crc32(f"{name} {ranks}".encode())
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.copy_(0.1 * noise)


def _export(bridge: Any, models: Any, lora: Any, case: Case, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    _save(
        bridge.export_hf_weights(models, cpu=True, show_progress=False, merge_adapter_weights=True), folder / "merged"
    )
    bridge.save_hf_adapter(
        models, str(folder / "bridge"), peft_config=lora, base_model_name_or_path="base", show_progress=False
    )
    state = models[0].sharded_state_dict(metadata=case.metadata or None)
    kept = {name: part for name, part in state.items() if case.whole or ".adapter." in name}
    dist_checkpointing.save({"model0": kept}, str(folder / "checkpoint"))
    if dist.get_rank() == 0:
        _run_config(lora, folder / "checkpoint")
    if case.in_place:
        _merge(models[0])
        # The names are wanted, and given back below.
        os.environ["ULTRA_PATCHES_ALLOW_UNMERGED"] = "1"
        plain = bridge.export_hf_weights(models, cpu=True, show_progress=False, merge_adapter_weights=False)
        _save(((name.replace(".base_layer", ""), tensor) for name, tensor in plain), folder / "in_place")


def _merge(model: torch.nn.Module) -> None:
    """Bridge's own merge of what each rank has: the weight that a rank's layer works with."""
    from megatron.bridge.peft.lora_layers import LoRALinear

    for module in model.modules():
        if isinstance(module, LoRALinear):
            with torch.no_grad():
                module.to_wrap.weight.copy_(module.weight)


def _save(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Every rank takes part in the export, one writes."""
    from safetensors.torch import save_file

    tensors = {name: tensor.clone().contiguous() for name, tensor in weights}
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _run_config(lora: Any, folder: Path) -> None:
    """As Bridge's own checkpoints have it: `ConfigContainer` writes each part by this function."""
    import yaml

    target = f"{type(lora).__module__}.{type(lora).__qualname__}"
    fields = {
        name: value for name, value in asdict(lora).items() if isinstance(value, (int, float, str, list, type(None)))
    }
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"peft": {"_target_": target, **fields}}))


if __name__ == "__main__":
    main()
