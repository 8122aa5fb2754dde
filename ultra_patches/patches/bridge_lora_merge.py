"""LoRA is merged into what the ranks have gathered, and lands in other experts or other rows, or nowhere."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.errors import UltraPatchesError
from ultra_patches.lora.probe import probe_merge
from ultra_patches.patch import Patch, Target, Variant
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

_CONVERSION = "megatron.bridge.models.conversion"
_STREAM = "MegatronModelBridge.stream_weights_megatron_to_hf"
_MERGE_GROUPED = "MegatronPeftBridge._merge_grouped_export_adapter_weights"
_MERGE = "MegatronPeftBridge._merge_lora_adapter_weights"


def build_stream(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(original)

    def stream_weights_megatron_to_hf(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if not given.get("merge_adapter_weights"):
            return original(self, *args, **kwargs)
        from megatron.core.utils import unwrap_model

        models = given["megatron_model"] if isinstance(given["megatron_model"], list) else [given["megatron_model"]]
        models = unwrap_model(models)
        if given["conversion_tasks"] is None:
            # From 0.6 on the tasks carry the dtype, which may not be given beside them.
            dtype = {"weight_dtype": given.pop("weight_dtype")} if "weight_dtype" in given else {}
            given["conversion_tasks"] = self.build_conversion_tasks(given["hf_pretrained"], models, **dtype)
        given["conversion_tasks"] = [_merging(self, models, task) for task in given["conversion_tasks"]]
        return original(*call.args, **call.kwargs)

    return stream_weights_megatron_to_hf


def build_merge_grouped(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _merge_grouped_export_adapter_weights(self: Any, task: Any, converted_weights_dict: Any, *_: Any) -> Any:
        # Merged before the conversion, by the tasks.
        return converted_weights_dict

    return _merge_grouped_export_adapter_weights


def build_merge(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _merge_lora_adapter_weights(
        self: Any, megatron_model: Any, converted_weights_dict: Any, adapter_weights: Any
    ) -> Any:
        if all(_is_ours(one.global_base_prefix) for one in adapter_weights):
            return converted_weights_dict
        return original(self, megatron_model, converted_weights_dict, adapter_weights)

    return _merge_lora_adapter_weights


def _is_ours(name: str) -> bool:
    """Whether a weight of its own Hugging Face tensor is merged wrongly once it is gathered.

    Those are experts that are modules of their own, as without grouped GEMM, and Mamba's in_proj, of which every
    tensor-parallel rank has rows of z, x, B, C and dt.
    """
    from megatron.core import parallel_state

    if ".local_experts." in name:
        return int(parallel_state.get_expert_model_parallel_world_size()) > 1
    return ".mixer.in_proj" in name and int(parallel_state.get_tensor_model_parallel_world_size()) > 1


def _merging(bridge: Any, models: list[Any], task: Any) -> Any:
    """The task, or for a weight that would be merged wrongly one that merges before it converts.

    Before the conversion each rank has its own shard with its own adapter; whatever the conversion does to the weight
    (gathers it, transposes it, interleaves gate and up, sorts rows) it then does to the adapter's part as well.
    """
    if task is None or ".to_wrap.weight" not in task.param_name:
        return task
    if not getattr(task.mapping, "is_grouped_export", False) and not _is_ours(task.param_name):
        return task
    if task.megatron_module is None:  # on another pipeline stage
        return task
    prefix, _, number = task.param_name.partition(".to_wrap.weight")
    adapter, _ = bridge._get_adapter_wrap_module(prefix, models, task.vp_stage)
    if not hasattr(adapter, "linear_in"):
        raise UltraPatchesError(
            f"{prefix} has a {type(adapter).__name__} of adapters, which Megatron-Bridge merges wrongly into experts: use LoRA "
            f"without canonical_lora on them"
        )
    mapping = copy.copy(task.mapping)
    expert = int(number or 0) if ".experts." in prefix else None
    mapping.megatron_to_hf = functools.partial(_convert, mapping.megatron_to_hf, adapter, expert)
    return dataclasses.replace(task, mapping=mapping)


def _convert(convert: Callable[..., Any], adapter: Any, expert: int | None, weight: Any, megatron_module: Any) -> Any:
    merged = (weight.detach().float() + _delta(adapter, expert, weight)).to(weight.dtype)
    return convert(merged, megatron_module)


def _delta(adapter: Any, expert: int | None, weight: Any) -> Any:
    """alpha / dim · B · A for this rank's shard, of one local expert or of none, in fp32 and of the shard's shape."""
    from megatron.core import parallel_state

    low, high = (
        _of_expert(linear.weight, expert or 0).to(weight.device) for linear in (adapter.linear_in, adapter.linear_out)
    )
    # Over tensor parallelism A is split along the rank under a column-parallel weight, B along the output under a
    # row-parallel one (ParallelLinearAdapter).
    group = (
        parallel_state.get_tensor_model_parallel_group()
        if expert is None
        else parallel_state.get_expert_tensor_parallel_group()
    )
    low = _whole(low, adapter.dim, group)
    high = _whole(high, len(weight), group)
    return adapter.alpha / adapter.dim * (high @ low)


def _of_expert(weight: Any, expert: int) -> Any:
    """A [rows, columns] matrix in fp32; 3D weights hold one for each local expert, or one for all."""
    weight = weight.detach()
    return (weight if weight.ndim == 2 else weight[expert if len(weight) > 1 else 0]).float()


def _whole(part: Any, rows: int, group: Any) -> Any:
    if len(part) == rows:
        return part
    import torch

    parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


_TARGET = Target(f"{_CONVERSION}.model_bridge", _STREAM, build_stream)
_SEQUENTIAL = Target(f"{_CONVERSION}.peft_bridge", _MERGE, build_merge)

PATCH = Patch(
    id="bridge-lora-merge",
    title="LoRA is merged by the rank that has the weight",
    upstream="megatron-bridge",
    description=(
        "Where Hugging Face holds all experts of a layer in one tensor (Qwen3-VL, Qwen3.5, GLM-4.5V, GPT-OSS), 0.4 exports them "
        "without the adapters. From 0.5 on, a rank gives every expert that it gathers from the other expert-parallel ranks "
        "the adapter of its own expert, and adds it after GPT-OSS's weights were transposed and interleaved. Without grouped "
        "GEMM (SequentialMLP) every model's experts get the adapters of other ranks, or from 0.5 on none. Under tensor "
        "parallelism the adapter of Mamba's in_proj is added to rows of another order. Here each rank merges its own shard "
        "before anything is gathered."
    ),
    who="full-weight refit with LoRA on experts (in 0.4 always, later with expert parallelism), or on Mamba's in_proj with TP > 1",
    origin="ultra-patches",
    bug="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3341",
    upstream_pr="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3341",
    pr_state="merged, in 0.5.0; the adapters of other ranks are wrong in 0.6.2",
    removal="every supported release merges each expert's own adapter under expert parallelism",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "0.5", (_TARGET, _SEQUENTIAL, Target(f"{_CONVERSION}.peft_bridge", _MERGE_GROUPED, build_merge_grouped))
        ),
        Variant("0.3", (_TARGET, _SEQUENTIAL)),
    ),
    probe=probe_merge,
    prepare=stand_in_for_gpu_packages,
    watches=(f"{_CONVERSION}.model_bridge:MegatronModelBridge._accumulate_grouped_export",),
)
