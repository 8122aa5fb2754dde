"""Export models under LoRA of Megatron-Bridge, merged and not, and print as JSON what comes out.

PYTHONPATH=<megatron-bridge>:<megatron-core> python lora_case.py
"""

import contextlib
import importlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ultra_patches
from tests.support import megatron_cpu
from ultra_patches import UltraPatchesError
from ultra_patches.lora import probe as probe_lora_ranks
from ultra_patches.lora import toys as probe_lora
from ultra_patches.patches.bridge_lora_refit import ALLOW
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

MODULES = ("megatron.bridge.models.conversion.model_bridge", "megatron.bridge.peft.lora")
NAME = "model.layers.0.mlp.down_proj.weight"


def main() -> None:
    megatron_cpu.prepare()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    stand_in_for_gpu_packages()
    files = [importlib.import_module(name).__file__ for name in MODULES]
    # Two ranks of their own, in forks, so before this process has a group.
    merge = probe_lora_ranks.probe_merge()
    groups = megatron_cpu.one_rank()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        seen: dict[str, Any] = {"toy": _toy(), "merge": [merge.verdict.value, merge.detail]}
        if "0.3" not in files[0]:
            seen["gpt-oss"] = _gpt_oss()
        if "0.6" in files[0]:
            seen["auto"] = _auto(Path(folder), groups)
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print(json.dumps({**seen, "files": files, "status": status}))


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """The names that an export gave, or its error."""
    try:
        return {"names": list(action())}
    except UltraPatchesError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 # what a release does by itself is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def _toy() -> dict[str, Any]:
    """One linear layer, through the function that every export of Megatron-Bridge calls."""
    import torch

    mappings: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    settings = probe_lora.config()

    def run(model: Any, **options: Any) -> dict[str, Any]:
        bridge = probe_lora.bridge(mappings.AutoMapping(*probe_lora.DENSE))
        return probe_lora.export(bridge, [model], [NAME], **options)

    def stream(model: Any, **options: Any) -> Any:
        bridge = probe_lora.bridge(mappings.AutoMapping(*probe_lora.DENSE))
        return bridge.stream_weights_megatron_to_hf([model], None, **options)

    def under(layer: Any) -> Any:
        return probe_lora.model(settings, "mlp.linear_fc2", layer)

    linear = probe_lora.adapt(probe_lora.dense_linear(settings), settings)
    lora = under(linear)
    before = {name: value.clone() for name, value in lora.named_parameters()}
    exports = [run(lora), run(lora)]
    delta = probe_lora.ALPHA / probe_lora.RANK * linear.adapter.linear_out.weight @ linear.adapter.linear_in.weight
    unmerged = outcome(lambda: run(lora, merge_adapter_weights=False))
    os.environ[ALLOW] = "1"
    allowed = outcome(lambda: run(lora, merge_adapter_weights=False))
    del os.environ[ALLOW]
    return {
        "merged": [torch.allclose(got[NAME], linear.to_wrap.weight + delta) for got in exports],
        "same twice": torch.equal(exports[0][NAME], exports[1][NAME]),
        "trainer unchanged": all(torch.equal(before[name], value) for name, value in lora.named_parameters()),
        "unmerged": unmerged,
        "allowed": allowed,
        "unmerged, not iterated": outcome(lambda: [type(stream(lora, merge_adapter_weights=False)).__name__]),
        "without adapters": outcome(lambda: run(under(probe_lora.dense_linear(settings)), merge_adapter_weights=False)),
        "dora": outcome(lambda: run(under(probe_lora.adapt(probe_lora.dense_linear(settings), settings, "dora")))),
    }


def _gpt_oss() -> dict[str, Any]:
    """Experts as GPT-OSS holds them, transposed, on one rank."""
    import torch

    oss: Any = importlib.import_module("megatron.bridge.models.gpt_oss.gpt_oss_bridge")
    settings = probe_lora.config(num_moe_experts=probe_lora_ranks.EXPERTS // probe_lora_ranks.RANKS)
    model, trained = probe_lora_ranks.grouped_model(settings, 0)
    name = probe_lora_ranks.GROUPED[1].replace("*", "0")
    bridge = probe_lora.bridge(oss.GPTOSSMLPDownProjMapping(*probe_lora_ranks.GROUPED))
    found: dict[str, Any] = {}

    def run() -> list[str]:
        found.update(probe_lora.export(bridge, [model], [name]))
        return list(found)

    seen = outcome(run)
    if name in found:
        got = found[name]
        seen["exact"] = torch.allclose(got if got.shape == trained.shape else got.transpose(1, 2), trained, atol=1e-5)
    return seen


def _auto(folder: Path, groups: Any) -> dict[str, Any]:
    """A tiny Llama with LoRA on all its linear layers, through AutoBridge."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora import LoRA

    # The stand-ins have no layers that a layer could be an instance of, and answer no question.
    utils.HAVE_TE = False
    importlib.import_module("megatron.bridge.models.conversion.auto_bridge").is_quantized = lambda _: False
    _checkpoint(folder)
    auto = AutoBridge.from_hf_pretrained(str(folder), torch_dtype=torch.float32)
    provider = auto.to_megatron_provider(load_weights=True)
    megatron_cpu.use_plain_layers(provider)
    provider.params_dtype, provider.bf16 = torch.float32, False
    provider.finalize()
    lora = LoRA(target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], dim=4, alpha=8, dropout=0.0)
    provider.register_pre_wrap_hook(lambda models: lora(models, training=True))
    models = provider.provide_distributed_model(
        wrap_with_ddp=False, bf16=False, use_cpu_initialization=True, data_parallel_random_init=False
    )
    with torch.no_grad():
        for name, value in models[0].named_parameters():
            if ".adapter." in name:
                value.normal_()

    def export(**options: Any) -> dict[str, Any]:
        return {n: w.clone() for n, w in auto.export_hf_weights(models, cpu=True, show_progress=False, **options)}

    merged = export()
    adapters = {n: w.clone() for n, w in auto.export_adapter_weights(models, cpu=True, show_progress=False)}
    sent = _weights(folder)
    tasks = auto.get_conversion_tasks(models)
    saved = folder / "saved"
    saved.mkdir()
    return {
        "names": sorted(sent) == sorted(merged),
        "adapted": len(adapters) // 2,
        "worst": _worst(sent, merged, adapters),
        "unmerged": outcome(lambda: export(merge_adapter_weights=False)),
        "tasks": outcome(lambda: export(merge_adapter_weights=False, conversion_tasks=tasks)),
        "quantised": outcome(
            lambda: dict(auto.export_hf_weights_quant(models, lambda _: False, lambda *a: a, show_progress=False))
        ),
        "saved": outcome(lambda: auto.save_hf_weights(models, saved, show_progress=False, merge_adapter_weights=False)),
        "files": [path.name for path in saved.iterdir()],
    }


def _checkpoint(folder: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _worst(sent: dict[str, Any], merged: dict[str, Any], adapters: dict[str, Any]) -> float:
    """The greatest difference of any weight from the checkpoint's, with 8 / 4 · B · A where there is an adapter."""
    wanted = {name: weight.double() for name, weight in sent.items()}
    for name, low in adapters.items():
        stem, found, _ = name.partition(".lora_A")
        if found:
            high = adapters[name.replace(".lora_A", ".lora_B")]
            wanted[f"{stem}.weight"] += 2 * high.double() @ low.double()
    return float(max((merged[name] - weight).abs().max().item() for name, weight in wanted.items()))


if __name__ == "__main__":
    main()
