"""Layers with transformer-engine's class and parameter names, on the CPU. For processes of tests only.

Megatron-Bridge builds NemotronH, and LoRA with expert adapters, from transformer-engine's layers alone, and
transformer-engine has no build for the CPU. These take the place of the classes in
`megatron.core.extensions.transformer_engine`, and of Mamba's gated norm, so that Bridge builds, converts, adapts and
checkpoints such models. Weights have the names, shapes, ranks and checkpoint keys of the released ones (Megatron-Core
0.19.2). Attention, MLPs and experts run forward and backward; a Mamba mixer holds its weights and does not run.

One process of a `torch.distributed` group of gloo, of any size:

    te_layers.prepare()  # before Megatron is imported; where `megatron_on_cpu.prepare` was called before: `install()`
    bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = 2
    te_layers.use(provider, torch.float32)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    models = provider.provide_distributed_model(wrap_with_ddp=False)

`sequence_parallel` is needed where tensor and expert parallelism meet, as on GPUs. Bridge takes NemotronH's convolution to
be four wide: `tiny_nemotron_h.save(folder, conv_kernel=4)`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.grpo import megatron_on_cpu
from examples.grpo.plain_layers import PLAIN
from ultra_patches.stand_ins.gpu_packages import stand_in_for_gpu_packages

_SETTINGS = PLAIN | {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True, "use_cpu_initialization": True}


def prepare() -> None:
    """Everything that a process without a GPU needs to build Bridge's models; once, before Megatron is imported."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    stand_in_for_gpu_packages()
    megatron_on_cpu.prepare()
    install()


def use(provider: Any, dtype: torch.dtype) -> None:
    """Let a provider of Bridge build its layers from these, with parameters of the dtype."""
    settings = _SETTINGS | {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }
    for name, value in settings.items():
        if hasattr(provider, name):
            setattr(provider, name, value)


def install() -> None:
    """Put these layers where Megatron-Core looks for transformer-engine's. Before Megatron-Bridge is imported."""
    import megatron.core.extensions.transformer_engine as extension

    if extension.HAVE_TE:
        raise RuntimeError("transformer-engine is installed: its own layers are there")
    made = _layers()
    replaced = {name: getattr(extension, name) for name in made}
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.core")]:
        for name, layer in made.items():
            if vars(module).get(name) is replaced[name]:
                setattr(module, name, layer)
    _open_guards(made)
    _stand_in_for_mamba_norm()


def _open_guards(made: dict[str, type[nn.Module]]) -> None:
    """Some modules import the classes only where transformer-engine is, and keep that in a name of their own."""
    import megatron.core.extensions.transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_layer

    provider.is_te_min_version = lambda *_, **__: True
    gpt_layer_specs.TESpecProvider = moe_module_specs.TESpecProvider = provider.TESpecProvider
    gpt_layer_specs.TENorm = made["TENorm"]
    gpt_layer_specs.HAVE_TE = moe_layer.HAVE_TE = True
    moe_layer.TELinear = made["TELinear"]
    for name in ("TELinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"):
        setattr(multi_latent_attention, name, made[name])


def _stand_in_for_mamba_norm() -> None:
    import megatron.core.ssm.mamba_mixer as mixer

    if mixer.HAVE_MAMBA_SSM:
        return

    class ExtendedRMSNorm(nn.Module):
        """The gated norm of a Mamba mixer: its weight [d_inner / tensor-parallel size], no forward."""

        def __init__(self, size: int, dtype: torch.dtype, **_: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            return _sharded(self, {"weight": 0}, prefix, sharded_offsets, metadata)

    mixer.ExtendedRMSNorm, mixer.HAVE_MAMBA_SSM = ExtendedRMSNorm, True


def _sharded(layer: Any, axes: dict[str, int], prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

    return make_sharded_tensors_for_checkpoint(
        layer.state_dict(keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=layer.tp_group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )


def _norm(x: Tensor, layer: Any, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension, computed in fp32."""
    scale = weight + 1 if layer.config.layernorm_zero_centered_gamma else weight
    return F.rms_norm(x.float(), (x.shape[-1],), None, layer.config.layernorm_epsilon).to(x.dtype) * scale


def _layers() -> dict[str, type[nn.Module]]:
    """The classes by their names in `megatron.core.extensions.transformer_engine`."""
    made: list[type[nn.Module]] = [_te_norm(), *_te_linears(), _te_linear(), _te_attention(), *_te_grouped()]
    return {layer.__name__: layer for layer in made}


def _te_norm() -> type[nn.Module]:
    class TENorm(nn.Module):
        """RMS norm of the last dimension."""

        def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
            super().__init__()
            if config.normalization != "RMSNorm":
                raise NotImplementedError(f"normalization {config.normalization}: only RMSNorm is built here")
            self.config = config
            self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

        def forward(self, x: Tensor) -> Tensor:
            return _norm(x, self, self.weight)

    return TENorm


def _te_linears() -> list[type[nn.Module]]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class TEColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc] # Any
        def __init__(self, inputs: int, outputs: int, **arguments: Any) -> None:
            super().__init__(inputs, outputs, **arguments)
            # transformer-engine counts what this rank has of a split dimension.
            self.in_features, self.out_features = inputs, self.weight.shape[0]
            self.tp_size = self.tp_group.size()

    class TERowParallelLinear(RowParallelLinear):  # type: ignore[misc] # Any
        def __init__(self, inputs: int, outputs: int, **arguments: Any) -> None:
            super().__init__(inputs, outputs, **arguments)
            self.in_features, self.out_features = self.weight.shape[1], outputs
            self.tp_size = self.tp_group.size()

    class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
        """Norm and linear in one; gives the normed input too where LoRA asks for it."""

        def __init__(self, inputs: int, outputs: int, **arguments: Any) -> None:
            super().__init__(inputs, outputs, **arguments)
            self.layer_norm_weight = nn.Parameter(torch.ones(inputs, dtype=self.config.params_dtype))
            self.return_layernorm_output = False
            # Else Bridge's LoRA asks for the version of transformer-engine.
            self.ub_overlap_ag = True

        def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
            normed = _norm(x, self, self.layer_norm_weight)
            out, bias = super().forward(normed, *arguments, **options)
            return ((out, normed), bias) if self.return_layernorm_output else (out, bias)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            return _sharded(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)

    return [TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear]


def _te_linear() -> type[nn.Module]:
    class TELinear(nn.Module):
        """A linear layer that every tensor-parallel rank has whole."""

        def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Callable[[Tensor], Any], **_: Any):
            super().__init__()
            self.config = config
            self.in_features, self.out_features, self.tp_size = inputs, outputs, 1
            self.parallel_mode = "duplicated"
            self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
            init_method(self.weight)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return F.linear(x, self.weight), None

    return TELinear


def _te_attention() -> type[nn.Module]:
    class TEDotProductAttention(nn.Module):
        """Causal attention over [sequence, batch, heads, head_dim]; no parameters."""

        def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
            super().__init__()
            self.scale = softmax_scale

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    return TEDotProductAttention


def _te_grouped() -> list[type[nn.Module]]:
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class Grouped(nn.Module):
        """The experts of this rank: `weight0`, `weight1`, …, each [out, in], of which one side is split."""

        split: int

        def __init__(
            self,
            experts: int,
            inputs: int,
            outputs: int,
            *,
            config: Any,
            init_method: Any,
            pg_collection: Any,
            **_: Any,
        ) -> None:
            super().__init__()
            self.config, self.num_gemms, self.groups, self.use_bias = config, experts, pg_collection, False
            shape = [outputs, inputs]
            shape[self.split] //= pg_collection.expt_tp.size()
            self.out_features, self.in_features = shape
            for expert in range(experts):
                weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
                init_method(weight)
                set_tensor_model_parallel_attributes(weight, pg_collection.expt_tp.size() > 1, self.split, 1)
                weight.allreduce = False
                self.register_parameter(f"weight{expert}", weight)

        def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            sizes = [int(size) for size in m_splits]
            parts = [F.linear(rows, getattr(self, f"weight{i}")) for i, rows in enumerate(x.split(sizes))]
            return torch.cat(parts), None

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            """One key for all experts, with a leading axis of all experts of all ranks."""
            first, every = self.groups.ep.rank() * self.num_gemms, self.groups.ep.size() * self.num_gemms
            found: dict[str, Any] = {}
            for expert in range(self.num_gemms):
                name = f"{expert}.weight"
                part = make_sharded_tensors_for_checkpoint(
                    {name: getattr(self, f"weight{expert}")},
                    "",
                    {name: self.split},
                    (*sharded_offsets, (len(sharded_offsets), first + expert, every)),
                    tp_group=self.groups.expt_tp,
                    dp_cp_group=metadata["dp_cp_group"],
                )
                replace_prefix_for_sharding(part, f"{expert}.", prefix)
                part[name].replica_id = (*part[name].replica_id[:2], self.groups.expt_dp.rank())
                found[f"{prefix}weight{expert}"] = part[name]
            return found

    class TEColumnParallelGroupedLinear(Grouped):
        split = 0

    class TERowParallelGroupedLinear(Grouped):
        split = 1

    return [TEColumnParallelGroupedLinear, TERowParallelGroupedLinear]
