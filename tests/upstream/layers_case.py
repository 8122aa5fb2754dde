"""Reload vLLM's own layers, whole, in parts and with weights sent twice; print what went wrong as JSON.

    PYTHONPATH=<sources of a release> VLLM_TARGET_DEVICE=cpu python layers_case.py [--compiled]

What is right is said by a second set of the same layers, which is loaded plainly and processed once. Memory that nobody wrote
is NaN. Linear, embedding and MoE layers are left as a GPU leaves them, but where the name says `packed`: there they are repacked for the
CPU. That, and int8, take the compiled operators of a release, which its sources do not have.
"""

import importlib
import inspect
import json
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import ultra_patches
from ultra_patches.errors import UltraPatchesError
from ultra_patches.reload import toys as probes

RELOAD = "vllm.model_executor.model_loader.reload"
INT8 = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
    "format": "int-quantized", "quant_method": "compressed-tensors", "ignore": [],
}  # fmt: skip


def build(config: Any, kind: str) -> Any:
    """A model of one or two layers, in bf16, with the loaders that vLLM gives them."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    config.compilation_config.static_forward_context.clear()
    model = nn.Module()
    torch.set_default_dtype(torch.bfloat16)
    try:
        if kind == "mixer":
            model.mixer = _mixer()
        elif kind.endswith("qkv"):
            model.qkv = linear.QKVParallelLinear(64, 16, 4, 2, bias=True, prefix="qkv")
        elif kind == "int8":
            quantised = importlib.import_module(
                "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
            ).CompressedTensorsConfig.from_config(INT8)
            model.gate_up = linear.MergedColumnParallelLinear(
                64, [32, 32], bias=False, quant_config=quantised, prefix="gate_up"
            )
        elif kind == "embedding":
            model.embed = vocab_parallel_embedding.VocabParallelEmbedding(100, 64, prefix="embed")
            model.head = vocab_parallel_embedding.ParallelLMHead(100, 64, prefix="head")
            model.head = model.head.tie_weights(model.embed)
        elif kind.endswith("experts"):
            fused = importlib.import_module("vllm.model_executor.layers.fused_moe")
            make = getattr(fused, "FusedMoEFactory", None) or fused.FusedMoE
            model.experts = make(
                num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, renormalize=True, prefix="experts",
                params_dtype=torch.bfloat16,
            )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    probes.record(model.requires_grad_(False))
    return model


def _mixer() -> Any:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    given: dict[str, Any] = {
        "hidden_size": 64, "ssm_state_size": 16, "conv_kernel_size": 4, "intermediate_size": 128, "use_conv_bias": True,
        "use_bias": False, "n_groups": 2, "num_heads": 8, "head_dim": 16, "rms_norm_eps": 1e-5, "activation": "silu",
        "use_rms_norm": True, "prefix": "mixer",
    }  # fmt: skip
    known = inspect.signature(MambaMixer2.__init__).parameters
    return MambaMixer2(**{name: value for name, value in given.items() if name in known})


def items(model: Any, seed: int) -> list[tuple[Any, ...]]:
    """What a checkpoint holds for a model: name, tensor, and what the loader takes besides."""
    generator = torch.Generator().manual_seed(seed)

    def draw(param: Any, *shape: int) -> Any:
        if param.dtype is torch.int8:
            return torch.randint(-100, 100, shape, generator=generator, dtype=torch.int8)
        value = torch.randn(shape, generator=generator) / 8
        return (value.abs() + 0.01 if param.dtype is torch.float32 and shape[-1] == 1 else value).to(param.dtype)

    found: list[tuple[Any, ...]] = []
    for name, param in model.named_parameters():
        if name.startswith("qkv."):
            rows = {"q": 64, "k": 32, "v": 32}
            found += [(name, draw(param, rows[s], *param.shape[1:]), s) for s in rows]
        elif name.startswith("gate_up."):
            found += [(name, draw(param, 32, *param.shape[1:]), s) for s in (0, 1)]
        elif name.startswith("embed."):
            found.append((name, draw(param, 100, 64)))
        elif name.endswith("w13_weight"):
            found += [(name, draw(param, 32, 64), name, s, e) for e in range(4) for s in ("w1", "w3")]
        elif name.endswith("w2_weight"):
            found += [(name, draw(param, 64, 32), name, "w2", e) for e in range(4)]
        else:
            found.append((name, draw(param, *param.shape)))
    return found


def process(model: Any) -> Any:
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
    return model


def load(model: Any, sent: Sequence[tuple[Any, ...]]) -> None:
    probes.load(model, [(name, tensor.clone(), *rest) for name, tensor, *rest in sent])


def session(model: Any, *calls: Sequence[tuple[Any, ...]]) -> None:
    layerwise = importlib.import_module(f"{RELOAD}.layerwise")
    layerwise.initialize_layerwise_reload(model)
    for sent in calls:
        load(model, sent)
    layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16, quantization=None))


def tensors(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def differing(model: Any, right: Any) -> list[str]:
    got, wanted = tensors(model), tensors(right)
    wrong = sorted(got.keys() ^ wanted.keys())
    for name in got.keys() & wanted.keys():
        if got[name].is_meta or not torch.equal(_bits(got[name]), _bits(wanted[name])):
            wrong.append(name)
    return wrong


def _bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def plans(sent: list[tuple[Any, ...]]) -> Iterator[tuple[str, list[list[tuple[Any, ...]]]]]:
    """How a session can carry weights, by name. What is not sent keeps its value."""
    mixed = random.Random(0).sample(sent, len(sent))
    half = len(sent) // 2
    yield "whole", [sent]
    yield "reversed", [sent[::-1]]
    yield "one call each", [[item] for item in mixed]
    yield "twice", [[item for item in mixed for _ in range(2)]]
    yield "begun again", [mixed[:half], mixed]
    for number, item in enumerate(sent):
        yield f"only {item[0]} {number}", [[item]]
        yield f"all but {item[0]} {number}", [sent[:number], sent[number + 1 :]]


def case(config: Any, kind: str) -> dict[str, Any]:
    wrong: dict[str, Any] = {}
    refused: dict[str, str] = {}
    probe = items(build(config, kind), 1)
    for number, (plan, _) in enumerate(plans(probe)):
        model, right = build(config, kind), build(config, kind)
        load(model, items(model, 0))
        process(model)
        where = {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
        before = {name: tensor.clone() for name, tensor in tensors(model).items()}
        calls = list(plans(items(right, 1)))[number][1]
        load(right, items(right, 0))
        for sent in calls:
            load(right, sent)
        process(right)
        try:
            session(model, *calls)
        except UltraPatchesError as error:
            refused[plan] = str(error)
            changed = [n for n, t in tensors(model).items() if not torch.equal(_bits(t), _bits(before[n]))]
        else:
            changed = differing(model, right)
        moved = [n for n, t in tensors(model).items() if t.data_ptr() != where.get(n)]
        if changed or moved:
            wrong[plan] = {"wrong": changed, "moved": moved}
    return {"plans": number + 1, "wrong": wrong, "refused": refused}


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import vllm.config
    import vllm.distributed
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    fused = importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    methods = (
        linear.UnquantizedLinearMethod,
        fused.UnquantizedFusedMoEMethod,
        vocab_parallel_embedding.UnquantizedEmbeddingMethod,
    )
    packs = [method.process_weights_after_loading for method in methods]
    kinds = ["mixer", "qkv", "embedding", "experts"]
    if "--compiled" in sys.argv:
        kinds += ["packed qkv", "packed experts", "int8"]
    config = vllm.config.VllmConfig()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, vllm.config.set_current_vllm_config(config), probes.poisoned():
        vllm.distributed.init_distributed_environment(1, 0, Path(folder, "store").as_uri(), 0, backend="gloo")
        vllm.distributed.ensure_model_parallel_initialized(1, 1)
        for kind in kinds:
            for method, pack in zip(methods, packs, strict=True):
                method.process_weights_after_loading = pack if "packed" in kind else lambda *_: None
            result[kind] = case(config, kind)
        torch.distributed.destroy_process_group()
    files = [sys.modules[f"{RELOAD}.{name}"].__file__ for name in ("meta", "layerwise")]
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print("\n" + json.dumps({"kinds": result, "status": status, "files": files}))


if __name__ == "__main__":
    main()
