"""Time and peak memory of a whole reload, with all patches and with none, turn by turn in one process; JSON.

    python tests/bench/reload_case.py [--rounds N] [--not-own] [--wrapt]

Layers of NemotronH's kinds with vLLM's own loaders, 0.4 GB in bf16. The weights are allocated for each load call, as NCCL's are;
with --not-own nobody says so, and what the reload keeps is copied. With --wrapt the other side is not a reload without
patches, but one in which wrapt wrappers stand around the same functions.
"""

import argparse
import importlib
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import wrapt

import ultra_patches
from ultra_patches import received
from ultra_patches.core import apply, overlay
from ultra_patches.reload import toys as probes
from ultra_patches.reload.upstream import LAYERWISE

EXPERTS, HIDDEN, INTER, LAYERS = 64, 1024, 256, 4


class Model(torch.nn.ModuleList):  # type: ignore[misc] # torch is not followed
    """Layers that are loaded as every model is: inside its `load_weights` a session sees what is written past the loaders."""

    def load_weights(self, weights: Any) -> None:
        probes.load(self, weights)


def build(config: Any) -> Any:
    """`LAYERS` times a Mamba2 mixer, QKV and experts."""
    from torch import nn
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    config.compilation_config.static_forward_context.clear()
    model = Model()
    torch.set_default_dtype(torch.bfloat16)
    for number in range(LAYERS):
        layer = nn.Module()
        layer.mixer = MambaMixer2(
            hidden_size=HIDDEN, ssm_state_size=64, conv_kernel_size=4, intermediate_size=2 * HIDDEN, use_conv_bias=True,
            use_bias=False, n_groups=8, num_heads=32, head_dim=64, rms_norm_eps=1e-5, activation="silu",
            prefix=f"{number}.mixer",
        )  # fmt: skip
        layer.qkv = linear.QKVParallelLinear(HIDDEN, 64, 16, 2, bias=True, prefix=f"{number}.qkv")
        layer.experts = FusedMoEFactory(
            num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, intermediate_size=INTER, renormalize=True,
            prefix=f"{number}.experts", params_dtype=torch.bfloat16,
        )  # fmt: skip
        model.append(layer)
    torch.set_default_dtype(torch.float32)
    probes.record(model.requires_grad_(False))
    return model


def items(model: Any) -> list[list[tuple[Any, ...]]]:
    """Names, shapes and what the loader takes besides, a list a layer."""
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for name, param in model.named_parameters():
        found = calls.setdefault(name.partition(".")[0], [])
        shape = tuple(param.shape)
        if ".qkv." in name:
            found += [(name, (rows, *shape[1:]), s) for s, rows in (("q", 1024), ("k", 128), ("v", 128))]
        elif name.endswith("w13_weight"):
            found += [(name, (INTER, HIDDEN), name, s, e) for e in range(EXPERTS) for s in ("w1", "w3")]
        elif name.endswith("w2_weight"):
            found += [(name, (HIDDEN, INTER), name, "w2", e) for e in range(EXPERTS)]
        else:
            found.append((name, shape))
    return list(calls.values())


def reload(model: Any, calls: Any, *, own: bool) -> float:
    """Seconds that a session takes without making the weights."""
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    took = 0.0
    probes.begin(model)
    for call in calls:
        sent = [(name, torch.full(shape, 0.5, dtype=dtypes[name]), *rest) for name, shape, *rest in call]
        began = time.perf_counter()
        with received.own_copies(own):
            model.load_weights(sent)
        took += time.perf_counter() - began
    began = time.perf_counter()
    probes.finish(model)
    return took + time.perf_counter() - began


def in_wrappers() -> dict[str, Any]:
    """Set a wrapt wrapper around each function of ours in reload.layerwise; gives what was there."""
    layerwise = importlib.import_module(LAYERWISE)
    ours = {name: value for name, value in vars(layerwise).items() if apply.owner_of(value)}
    for name, function in ours.items():
        setattr(
            layerwise, name, wrapt.FunctionWrapper(function, lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs))
        )
    return ours


def peak() -> int:
    """Bytes of the most memory this process had since the last call."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return found * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--not-own", action="store_true")
    parser.add_argument("--wrapt", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    import vllm.config
    import vllm.distributed
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for method in (linear.UnquantizedLinearMethod, UnquantizedFusedMoEMethod):
        method.process_weights_after_loading = lambda *_: None
    config = vllm.config.VllmConfig()
    kinds = ("patched", "wrapt" if options.wrapt else "plain")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    peaks: dict[str, list[int]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder, vllm.config.set_current_vllm_config(config):
        vllm.distributed.init_distributed_environment(1, 0, Path(folder, "store").as_uri(), 0, backend="gloo")
        vllm.distributed.ensure_model_parallel_initialized(1, 1)
        model = build(config)
        calls = items(model)
        for number in range(2 * options.rounds):
            kind = kinds[number % 2]
            overlay.disarm()
            wrapped: dict[str, Any] = {}
            if kind != "plain":
                overlay.arm()
                wrapped = in_wrappers() if kind == "wrapt" else {}
            if kind == "patched":
                states = {row.id: row.state.value for row in ultra_patches.status()}
            peak()
            times[kind].append(reload(model, calls, own=not options.not_own))
            peaks[kind].append(peak())
            vars(importlib.import_module(LAYERWISE)).update(wrapped)
        torch.distributed.destroy_process_group()
    size = {name: p.nbytes for name, p in model.named_parameters()}
    print("\n" + json.dumps({
        "states": states, "times": times, "peaks": peaks, "tensors": sum(map(len, calls)),
        "bytes": sum(size.values()), "largest layer": max(size.values()) * 3 // 2,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
