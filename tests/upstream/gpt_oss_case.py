"""Update a small GPT-OSS in bf16 from one checkpoint to another, in sessions of six forms; print what is wrong as JSON.

    VLLM_TARGET_DEVICE=cpu python gpt_oss_case.py

The model is vLLM's, on what is installed, without an engine. What is right is said by models that were loaded from the
checkpoint that the update leads to: every parameter, every buffer, and every other tensor on a module, bit for bit.
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", TQDM_DISABLE="1")

import torch
from safetensors.torch import save_file

import ultra_patches
from compat.zoo import compare
from ultra_patches.errors import UltraPatchesError
from ultra_patches.reload import toys as probes

RELOAD = "vllm.model_executor.model_loader.reload"
HIDDEN, INTER, EXPERTS, HEADS, KV, DIM, VOCAB, LAYERS = 64, 64, 4, 4, 2, 16, 128, 2
CONFIG = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": INTER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-5,
    "attention_bias": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 1e4,
}  # fmt: skip


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Names and shapes as Hugging Face has them, values from a seed."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name, rows in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM)):
            projection = f"{layer}.self_attn.{name}_proj"
            shapes |= {f"{projection}.weight": (rows, HIDDEN), f"{projection}.bias": (rows,)}
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM), f"{layer}.self_attn.o_proj.bias": (HIDDEN,),
            f"{layer}.self_attn.sinks": (HEADS,), f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,), f"{layer}.mlp.router.weight": (EXPERTS, HIDDEN),
            f"{layer}.mlp.router.bias": (EXPERTS,), f"{layer}.mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INTER),
            f"{layer}.mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * INTER),
            f"{layer}.mlp.experts.down_proj": (EXPERTS, INTER, HIDDEN),
            f"{layer}.mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def made(weights: Mapping[str, torch.Tensor], folder: Path) -> tuple[Any, Any]:
    """A model that vLLM has loaded from these weights, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    folder.mkdir()
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16"
    ).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def update(model: Any, config: Any, *calls: Mapping[str, torch.Tensor]) -> None:
    """One session; each call's tensors are overwritten once it has returned."""
    from vllm.config import set_current_vllm_config

    def sent(call: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        # One buffer for all, as a transport has it.
        buffer = torch.empty(max(value.numel() for value in call.values()), dtype=torch.bfloat16)
        for name, value in call.items():
            held = buffer[: value.numel()].view(value.shape)
            held.copy_(value)
            yield name, held

    with set_current_vllm_config(config), torch.no_grad():
        probes.begin(model)
        for call in calls:
            model.load_weights(sent(call))
        sys.modules[f"{RELOAD}.layerwise"].finalize_layerwise_reload(model, config.model_config)


def main() -> None:
    warnings.simplefilter("ignore")
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    a, b = checkpoint(0), checkpoint(1)
    part = {name: value for name, value in b.items() if "sinks" in name or "norm" in name}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first, config = made_first(a, folder, init_distributed_environment, ensure_model_parallel_initialized)
        targets = {"a": a, "b": b, "part": {**a, **part}}
        right = {name: compare.tensors(made(weights, folder / name)[0]) for name, weights in targets.items()}
        names = list(b)
        sessions: dict[str, tuple[str, list[Mapping[str, torch.Tensor]]]] = {
            "whole": ("b", [b]), "back": ("a", [a]),  # each goes on from the one before
            "sinks and norms": ("part", [part]),
            "chunks": ("b", [{name: b[name] for name in names[start::3]} for start in range(3)]),
            "twice": ("a", [a, a]), "reversed": ("b", [{name: b[name] for name in reversed(names)}]),
        }  # fmt: skip
        wrong: dict[str, Any] = {}
        for title, (target, calls) in sessions.items():
            try:
                update(first, config, *calls)
                wrong[title] = compare.differ(right[target], compare.tensors(first))
            except UltraPatchesError as error:
                wrong[title] = [str(error)]
    files = [sys.modules[f"{RELOAD}.{name}"].__file__ for name in ("meta", "layerwise")]
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print("\n" + json.dumps({"wrong": wrong, "tensors": len(right["a"]), "status": status, "files": files}))


def made_first(weights: Mapping[str, torch.Tensor], folder: Path, world: Any, groups: Any) -> tuple[Any, Any]:
    """The first model of a process, for which the groups are made."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        world(1, 0, (folder / "store").as_uri(), 0, backend="gloo")
        groups(1, 1)
    return made(weights, folder / "first")


if __name__ == "__main__":
    main()
