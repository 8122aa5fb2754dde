"""Bridge 0.2 and 0.3 load a model before they wrap it, and round the router's expert bias (Megatron-Bridge#2248)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.bias.hold import Held, hold, put_back
from ultra_patches.bias.probe import judge, toy_config, toy_router
from ultra_patches.patch import Finding, Patch, Target, Variant
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

_MODULE = "megatron.bridge.models.model_provider"


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(original)

    def get_model(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("pre_wrap_hook")
        hooks = list(given) if isinstance(given, (list, tuple)) else [given] if given else []
        held: list[Held] = []

        def hold_biases(model: Any) -> None:
            held.extend(hold(model))

        # The user's hooks may load weights, so the bias is held after the last of them.
        call.arguments["pre_wrap_hook"] = [*hooks, hold_biases]
        model = original(*call.args, **call.kwargs)
        put_back(held)
        return model

    return get_model


def probe() -> Finding:
    """Build a model through `get_model` with a hook that loads a trained bias, in a process group of one rank."""
    import importlib
    import inspect

    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType

    provider_module: Any = importlib.import_module(_MODULE)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model, bias = toy_router()
    groups = {}
    if "pg_collection" in inspect.signature(provider_module.get_model).parameters:
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    provider = toy_config()
    provider.provide = functools.partial(_provide, model)
    provider_module.get_model(
        provider,
        None,
        ModelType.encoder_or_decoder,
        bf16=True,
        wrap_with_ddp=False,
        use_cpu_initialization=True,
        **groups,
    )
    return judge(model, bias)


def _provide(model: Any, *_: Any, **__: Any) -> Any:
    return model


PATCH = Patch(
    id="bridge-router-bias-get-model",
    title="Bridge's get_model leaves the router's expert bias in fp32",
    upstream="megatron-bridge",
    description=(
        "`provide_distributed_model` loads Hugging Face weights in a pre-wrap hook and then wraps the model in "
        "Float16Module, which rounds `expert_bias`; the relabelling after it hides that. 0.4.0 holds the bias across the wrap."
    ),
    who="AutoBridge users on megatron-bridge 0.2 and 0.3, with any mixed-precision wrapper",
    origin="ultra-patches",
    bug="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2248",
    upstream_pr="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2248",
    pr_state="merged, in 0.4.0",
    removal="megatron-bridge < 0.4 is no longer supported",
    last_checked="2026-11-29",
    variants=(Variant("all", (Target(_MODULE, "get_model", build),)),),
    probe=probe,
    prepare=stand_in_for_gpu_packages,
)
