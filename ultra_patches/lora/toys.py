"""What the probes of LoRA share: a Megatron module with real adapters of Megatron-Bridge, and what an export makes of it."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

from ultra_patches.patch import Finding, Verdict

_BRIDGE = "megatron.bridge.models.conversion.model_bridge"
_MAPPINGS = "megatron.bridge.models.conversion.param_mapping"
_ADAPTERS = "megatron.bridge.peft.utils"
#: Sizes of the toy: hidden, intermediate, LoRA's rank and alpha.
HIDDEN, INNER, RANK, ALPHA = 6, 10, 2, 4
DENSE = ("decoder.layers.*.mlp.linear_fc2.weight", "model.layers.*.mlp.down_proj.weight")


def join(store: Any, rank: int, world: int, **parallel: int) -> None:
    """Megatron's groups over gloo."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**parallel)


def config(**fields: Any) -> Any:
    """A TransformerConfig of the toy, on the CPU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=INNER,
        num_attention_heads=2,
        use_cpu_initialization=True,
        **fields,
    )
    made.share_embeddings_and_output_weights = False
    return made


def bridge(mapping: Any) -> Any:
    """A bridge of one mapping, whose conversion is all Megatron-Bridge's own."""
    registry: Any = importlib.import_module("megatron.bridge.models.conversion.mapping_registry")
    base: Any = importlib.import_module(_BRIDGE).MegatronModelBridge
    methods = {
        "provider_bridge": lambda *_: None,
        "mapping_registry": lambda _: registry.MegatronMappingRegistry(mapping),
    }
    return type("Bridge", (base,), methods)()


def model(settings: Any, path: str, layer: Any) -> Any:
    """A Megatron module with `layer` as `decoder.layers.0.` and `path`."""
    import torch
    from megatron.core.transformer.module import MegatronModule

    made = MegatronModule(settings)
    made.decoder = torch.nn.Module()
    made.decoder.layers = torch.nn.ModuleList([torch.nn.Module()])
    at = made.decoder.layers[0]
    *parents, last = path.split(".")
    for name in parents:
        at.add_module(name, torch.nn.Module())
        at = at.get_submodule(name)
    at.add_module(last, layer)
    return made


def dense_linear(settings: Any) -> Any:
    """Core's RowParallelLinear of [HIDDEN, INNER]."""
    import torch
    from megatron.core.tensor_parallel import RowParallelLinear

    return RowParallelLinear(
        INNER,
        HIDDEN,
        config=settings,
        init_method=torch.nn.init.normal_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )


def adapt(
    linear: Any, settings: Any, kind: str = "lora", *, is_expert: bool = False, name: str = "mlp.linear_fc2"
) -> Any:
    """A linear layer under an adapter of Megatron-Bridge, `lora` or `dora`, with values from a normal distribution."""
    import torch

    layers: Any = importlib.import_module(f"megatron.bridge.peft.{kind}_layers")
    adapters: Any = layers if kind == "dora" else importlib.import_module(_ADAPTERS)
    made = getattr(adapters, "ParallelLinearDoRAAdapter" if kind == "dora" else "ParallelLinearAdapter")
    row_parallel = name != "mixer.in_proj"
    adapter = made(
        linear.input_size if not row_parallel else INNER,
        linear.output_size if not row_parallel else HIDDEN,
        RANK,
        name,
        activation="identity",
        input_is_parallel=row_parallel,
        model_parallel_config=settings,
        alpha=ALPHA,
        is_expert=is_expert,
    )
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_()
    return (layers.DoRALinear if kind == "dora" else layers.LoRALinear)(linear, adapter)


def export(converter: Any, models: list[Any], names: list[str], **options: Any) -> dict[str, Any]:
    """All that `stream_weights_megatron_to_hf` yields, by name; `names` are those of the checkpoint."""
    state = type("State", (dict,), {"source": SimpleNamespace(get_all_keys=lambda: names)})()
    # Bridge reads the names of the checkpoint, its config and nothing else of it here.
    checkpoint = SimpleNamespace(state=state, config=SimpleNamespace(), model_name_or_path="toy")
    stream = converter.stream_weights_megatron_to_hf(models, checkpoint, show_progress=False, **options)
    return {name: tensor.detach().clone() for name, tensor in stream}


def probe_refit() -> Finding:
    """Export one linear layer under LoRA without merging, and one under DoRA with it, in a group of one rank."""
    import torch
    import torch.distributed as dist

    join(dist.HashStore(), 0, 1)
    stream = importlib.import_module(_BRIDGE).MegatronModelBridge.stream_weights_megatron_to_hf
    settings = config()
    linear = adapt(dense_linear(settings), settings)
    mapping = importlib.import_module(_MAPPINGS).AutoMapping(*DENSE)
    name = DENSE[1].replace("*", "0")
    lora = [model(settings, "mlp.linear_fc2", linear)]
    if "merge_adapter_weights" not in inspect.signature(stream).parameters:
        try:
            export(bridge(mapping), lora, [name])
        except AttributeError as error:
            return Finding(Verdict.CLEAN, f"no export of a model with adapters: {type(error).__name__}: {error}")
        return Finding(Verdict.DEFECT, "a model with adapters is exported, and none is merged")
    merged = linear.to_wrap.weight + ALPHA / RANK * linear.adapter.linear_out.weight @ linear.adapter.linear_in.weight
    if not torch.allclose(export(bridge(mapping), lora, [name])[name], merged):
        return Finding(Verdict.DEFECT, f"{name} is not merged")
    dora = [model(settings, "mlp.linear_fc2", adapt(dense_linear(settings), settings, "dora"))]
    passed = [
        f"{kind}: {got}"
        for kind, models, options in (("LoRA", lora, {"merge_adapter_weights": False}), ("DoRA", dora, {}))
        if (got := _exported_names(bridge(mapping), models, [name], **options))
    ]
    if passed:
        return Finding(Verdict.DEFECT, f"exported without an error, {'; '.join(passed)}")
    return Finding(Verdict.CLEAN, "merged LoRA is exported, unmerged LoRA and DoRA are refused")


def _exported_names(*args: Any, **options: Any) -> str:
    """The names that an export gives, empty where the overlay refuses it."""
    from ultra_patches.errors import UltraPatchesError

    try:
        return ", ".join(export(*args, **options))
    except UltraPatchesError:
        return ""
