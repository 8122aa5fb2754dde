"""Take a tiny DeepSeek-V3 from a Hugging Face checkpoint into a wrapped Megatron model and out again, on one rank.

    PYTHONPATH=<megatron-bridge>:<megatron-core> python round_trip_case.py

Prints as JSON what the exports differ in from the checkpoint, and what the overlay's check of exported names says.
"""

import contextlib
import importlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ultra_patches
from tests.support import megatron_cpu
from tests.upstream.bias_case import EXPERTS, look, trained
from ultra_patches import UltraPatchesError
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

MODULES = ("megatron.core.transformer.module", "megatron.bridge.models.conversion.model_bridge")


def main() -> None:
    megatron_cpu.prepare()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    stand_in_for_gpu_packages()
    files = [importlib.import_module(name).__file__ for name in MODULES]
    megatron_cpu.one_rank()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        exports = _round_trip(Path(folder))
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print(json.dumps({"exports": exports, "files": files, "status": status}))


def _round_trip(folder: Path) -> dict[str, Any]:
    import torch
    from megatron.bridge import AutoBridge
    from safetensors.torch import load_file

    _checkpoint(folder)
    sent = load_file(folder / "model.safetensors")
    auto = AutoBridge.from_hf_pretrained(str(folder), torch_dtype=torch.bfloat16)
    provider = auto.to_megatron_provider(load_weights=True)
    megatron_cpu.use_plain_layers(provider)
    provider.make_vocab_size_divisible_by = 128
    provider.bf16, provider.params_dtype, provider.pipeline_dtype = True, torch.bfloat16, torch.bfloat16
    provider.finalize()
    models = provider.provide_distributed_model(
        wrap_with_ddp=False, bf16=True, use_cpu_initialization=True, data_parallel_random_init=False
    )
    return {
        str(dtype).removeprefix("torch."): _compare(
            sent, dict(auto.export_hf_weights(models, cpu=True, show_progress=False, weight_dtype=dtype))
        )
        for dtype in (None, torch.bfloat16)
    }


def _checkpoint(folder: Path) -> None:
    """One dense layer and two MoE layers of 512 experts, in bf16, with trained router biases in fp32."""
    import torch
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        num_nextn_predict_layers=0,
        architectures=["DeepseekV3ForCausalLM"],
        dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    gates = [module for module in model.modules() if "e_score_correction_bias" in module._buffers]
    for seed, gate in enumerate(gates):
        gate.e_score_correction_bias = trained(seed)
    model.save_pretrained(folder)


def _compare(sent: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    import torch

    biases = {name for name in got if name.endswith("e_score_correction_bias")}
    return {
        "names": len(got),
        "other names": sorted(sent.keys() ^ got.keys()),
        "changed": [name for name in sorted(got.keys() & sent.keys()) if not torch.equal(got[name], sent[name])],
        "biases": {name: look(got[name], sent[name]) for name in sorted(biases)},
        "check": _check(got, required=True),
        "check without the biases": _check(got.keys() - biases, required=True),
        "check without one bias": _check(got.keys() - {min(biases)}),
    }


def _check(names: Iterable[str], **options: bool) -> str | None:
    """The complaint of the overlay about exported names, None where it has none."""
    try:
        ultra_patches.check_router_biases(names, **options)
    except UltraPatchesError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
