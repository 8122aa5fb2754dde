"""Wrap real Megatron routers with a trained expert bias on every path that wraps, and print what is left as JSON.

PYTHONPATH=<megatron-bridge>:<megatron-core> python bias_case.py {core|builder|bridge} ...
"""

import argparse
import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ultra_patches
from tests.support import megatron_cpu
from ultra_patches import UltraPatchesWarning
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

EXPERTS = 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parts = parser.parse_args().parts
    megatron_cpu.prepare()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    modules = ["megatron.core.transformer.module", "megatron.core.transformer.moe.router"]
    if "bridge" in parts:
        stand_in_for_gpu_packages()
        modules.append("megatron.bridge.models.model_provider")
    files = [importlib.import_module(name).__file__ for name in modules]
    groups = megatron_cpu.one_rank()
    with contextlib.redirect_stdout(io.StringIO()):
        seen = {part: PARTS[part](groups) for part in parts}
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print(json.dumps({**seen, "files": files, "status": status}))


def trained(seed: int = 0) -> Any:
    import torch

    return 40.1 + 7e-4 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(seed))


#: A transformer of one MoE layer with a router bias.
FIELDS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 22,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "use_cpu_initialization": True,
    "bf16": True,
}


def _config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**{**FIELDS, **changes})


def _model(config: Any, groups: Any) -> Any:
    """A Megatron module with core's own TopKRouter in it, fresh."""
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.router import TopKRouter

    model = MegatronModule(config)
    model.router = TopKRouter(config, pg_collection=groups)
    return model


def _load(models: list[Any], name: str = "expert_bias", bias: Any = None) -> list[Any]:
    """What a hook that loads a checkpoint does to the bias."""
    for model in models:
        getattr(model.router, name).copy_(trained() if bias is None else bias)
    return models


def _own(_: Any, model: Any) -> Any:
    """A wrapper of the user's own, which no patch of Float16Module reaches."""
    return model.bfloat16()


def _own_in_place(_: Any, model: Any) -> Any:
    """Another one, which keeps every tensor object and changes what it holds."""
    import itertools

    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.bfloat16()
    return model


def look(found: Any, sent: Any) -> dict[str, Any]:
    import torch

    return {
        "exact": found.dtype is torch.float32 and torch.equal(found, sent),
        "distinct": found.unique().numel(),
        "dtype": str(found.dtype).removeprefix("torch."),
    }


def _stages(wrapped: Any, router: Any, name: str = "expert_bias") -> dict[str, Any]:
    """The bias as the wrap left it, after core's own upkeep, and as a checkpoint gets it."""
    seen = {"wrapped": look(getattr(router, name), trained())}
    router._maintain_float32_expert_bias()
    seen["maintained"] = look(getattr(router, name), trained())
    saved = [value for key, value in wrapped.state_dict().items() if key.endswith(f"router.{name}")]
    seen["state dict"] = look(saved[0], trained())
    seen["weight"] = str(router.weight.dtype).removeprefix("torch.")
    return seen


def _complaints(action: Callable[[], Any]) -> list[str]:
    """The overlay's warnings while something is done."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in caught if issubclass(one.category, UltraPatchesWarning)]


def core(groups: Any) -> dict[str, Any]:
    """Float16Module, as every trainer in mixed precision uses it."""
    import torch
    from megatron.core.transformer.module import Float16Module

    seen: dict[str, Any] = {}
    for name, config in (("bf16", _config()), ("fp16", _config(bf16=False, fp16=True))):
        (model,) = _load([_model(config, groups)])
        seen[name] = _stages(Float16Module(config, model), model.router)
    rounded = trained().bfloat16()
    arriving = {"fresh": torch.zeros(EXPERTS), "trained": trained(), "rounded": rounded, "relabelled": rounded.float()}
    seen |= {name: _arriving(groups, bias) for name, bias in arriving.items()}

    # A resumed run loads its checkpoint after the wrap.
    config = _config()
    model = _model(config, groups)
    wrapped = Float16Module(config, model)
    saved = wrapped.state_dict()
    key = next(name for name in saved if name.endswith("router.expert_bias"))
    wrapped.load_state_dict({**saved, key: trained()})
    seen["loaded after the wrap"] = look(model.router.expert_bias, trained())

    try:
        config = _config(moe_router_load_balancing_type="quantile_balancing", moe_router_enable_expert_bias=False)
        model = _model(config, groups)
        model.router.get_buffer("qb_beta")
    except (AttributeError, ValueError):
        return seen  # core 0.19 brought it
    for name in ("qb_beta", "qb_beta_accum"):
        _load([model], name)
    wrapped = Float16Module(config, model)
    seen["qb_beta_accum"] = look(model.router.qb_beta_accum, trained())
    seen["qb_beta"] = _stages(wrapped, model.router, "qb_beta")
    return seen


def _arriving(groups: Any, bias: Any) -> dict[str, Any]:
    """A model that comes to the wrap with some bias: whether it is changed, and what is said."""
    import torch
    from megatron.core.transformer.module import Float16Module

    config = _config()
    model = _model(config, groups)
    model.router.expert_bias = bias.clone()
    complaints = _complaints(lambda: Float16Module(config, model))
    return {"unchanged": torch.equal(model.router.expert_bias.float(), bias.float()), "complaints": complaints}


def _wrappers() -> dict[str, Any]:
    from megatron.core.transformer.module import Float16Module

    return {"Float16Module": Float16Module, "own": _own, "own in place": _own_in_place}


def _built(module: str, groups: Any) -> dict[str, Any]:
    """Models built and wrapped by a module that has the builder's functions."""
    builder: Any = importlib.import_module(module)
    seen: dict[str, Any] = {}
    for name, wrapper in _wrappers().items():
        config = _config()
        (model,) = _load([_model(config, groups)])
        (wrapped,) = builder._wrap_with_mp_wrapper([model], config, wrapper)
        seen[f"wrap, {name}"] = _stages(wrapped, model.router)
        model = _model(config, groups)
        (wrapped,) = builder.unimodal_build_distributed_models(
            lambda *_, model=model, **__: model,
            config,
            groups,
            wrap_with_ddp=False,
            mixed_precision_wrapper=wrapper,
            pre_wrap_hook=_load,
        )
        seen[f"build, {name}"] = _stages(wrapped, model.router)
    return seen


def builder(groups: Any) -> dict[str, Any]:
    """The model builder of megatron.training."""
    config = _config()
    (model,) = _load([_model(config, groups)], bias=trained().bfloat16().float())
    module: Any = importlib.import_module("megatron.training.models.dist_utils")
    complaints = _complaints(lambda: module._wrap_with_mp_wrapper([model], config))
    return {**_built(module.__name__, groups), "complaints": complaints}


def bridge(groups: Any) -> dict[str, Any]:
    """Bridge's providers, which load Hugging Face weights in a hook before the wrap, and its builder."""
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclass
    class Provider(TransformerConfig, ModelProviderMixin):  # type: ignore[misc] # both are Any here
        def provide(self, *_: Any, **__: Any) -> Any:
            self.built = _model(self, groups)
            return self.built

        def finalize(self) -> None:
            """Abstract from 0.5 on."""

    seen: dict[str, Any] = {}
    for name, wrapper in _wrappers().items():
        for hooks in (_load, [lambda models: models, _load]):
            provider = Provider(**FIELDS)
            (wrapped,) = provider.provide_distributed_model(
                wrap_with_ddp=False,
                bf16=True,
                use_cpu_initialization=True,
                data_parallel_random_init=False,
                pre_wrap_hook=hooks,
                mixed_precision_wrapper=wrapper,
                **({"pg_collection": groups} if hasattr(ModelProviderMixin, "pg_collection") else {}),
            )
            seen[f"provide, {name}, {'hooks' if hooks is not _load else 'hook'}"] = _stages(
                wrapped, provider.built.router
            )
    with contextlib.suppress(ModuleNotFoundError):  # 0.4 brought it
        seen |= _built("megatron.bridge.models.common.unimodal", groups)
    return seen


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {"core": core, "builder": builder, "bridge": bridge}

if __name__ == "__main__":
    main()
