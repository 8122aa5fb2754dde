"""The probe of merging over ranks: two export experts, and a Mamba in_proj, which must have the adapters of their own."""

from __future__ import annotations

import importlib
import multiprocessing
import queue
import tempfile
from pathlib import Path
from typing import Any

from ultra_patches.lora.toys import (
    ALPHA,
    HIDDEN,
    INNER,
    RANK,
    adapt,
    bridge,
    config,
    dense_linear,
    export,
    join,
    model,
)
from ultra_patches.patch import Finding, Verdict

_BRIDGE = "megatron.bridge.models.conversion.model_bridge"
_MAPPINGS = "megatron.bridge.models.conversion.param_mapping"
_ADAPTERS = "megatron.bridge.peft.utils"
EXPERTS, RANKS = 4, 2
GROUPED = ("decoder.layers.*.mlp.experts.linear_fc2.weight*", "model.layers.*.mlp.experts.down_proj")
SEQUENTIAL = (
    "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.weight",
    "model.layers.*.mlp.experts.*.down_proj.weight",
)
IN_PROJ = ("decoder.layers.*.mixer.in_proj.weight", "backbone.layers.*.mixer.in_proj.weight")
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 2, "mamba_state_dim": 3, "mamba_num_groups": 2}
#: Of each of two ranks: z and x of heads x head_dim, B and C of groups x state, dt of heads.
_ROWS = [4, 4, 3, 3, 2]


def grouped_model(settings: Any, ep_rank: int) -> tuple[Any, Any]:
    """A rank's model of EXPERTS / RANKS experts under LoRA, and the merged weights as [experts, HIDDEN, INNER]."""
    import torch

    local = EXPERTS // RANKS
    # Megatron-Bridge tells a row-parallel layer by the name of its class; this one stands for transformer-engine's.
    linear = type("TERowParallelGroupedLinear", (torch.nn.Module,), {})()
    linear.config, linear.num_gemms = settings, local
    torch.manual_seed(ep_rank)
    for expert in range(local):
        linear.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.randn(HIDDEN, INNER)))
    adapters: Any = importlib.import_module(_ADAPTERS)
    wrapped = adapt(linear, settings, is_expert=True)
    if hasattr(adapters, "GroupedExpertLinearAdapter"):
        wrapped.adapter = adapters.GroupedExpertLinearAdapter(
            INNER,
            HIDDEN,
            RANK,
            num_local_experts=local,
            base_linear_name="linear_fc2",
            activation="identity",
            row_init_method="xavier",
            input_is_parallel=True,
            model_parallel_config=settings,
            alpha=ALPHA,
        )
    delta = ALPHA / RANK * wrapped.adapter.linear_out.weight @ wrapped.adapter.linear_in.weight
    base = torch.stack([linear.get_parameter(f"weight{expert}") for expert in range(local)])
    return model(settings, "mlp.experts.linear_fc2", wrapped), (base + delta).detach()


def probe_merge() -> Finding:
    """Export four experts, two on each of two expert-parallel ranks, in one tensor and apart; and Mamba's in_proj over two
    tensor-parallel ranks; all under LoRA.
    """
    if not hasattr(importlib.import_module(_BRIDGE).MegatronModelBridge, "_merge_lora_adapter_weights"):
        return Finding(Verdict.CLEAN, "this release merges no adapters")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    found: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, Path(folder) / "store", results)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        try:
            found = dict(results.get(timeout=60) for _ in ranks)
        except queue.Empty:
            return Finding(Verdict.INCONCLUSIVE, "a rank does not answer within 60 s")
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
    failed = next((text for text in found.values() if text.startswith("error")), None)
    if failed:
        return Finding(Verdict.INCONCLUSIVE, failed)
    wrong = [f"rank {rank}: {text}" for rank, text in sorted(found.items()) if text]
    if wrong:
        return Finding(Verdict.DEFECT, "; ".join(wrong))
    return Finding(
        Verdict.CLEAN, f"{EXPERTS} experts on {RANKS} ranks, and Mamba's in_proj over them, have their own adapters"
    )


def _rank(rank: int, store: Path, results: Any) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    try:
        join(dist.FileStore(str(store), RANKS), rank, RANKS, expert_model_parallel_size=RANKS)
        # All of them, whatever one finds: each is a collective.
        wrong = [_wrong_grouped(rank), _wrong_sequential(rank)]
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
        wrong.append(_wrong_mamba(rank))
        results.put((rank, "; ".join(filter(None, wrong))))
    except Exception as error:  # noqa: BLE001 # reported to the parent, which judges
        results.put((rank, f"error: {type(error).__name__}: {error}"))


def _wrong_grouped(rank: int) -> str:
    if not hasattr(importlib.import_module(_MAPPINGS), "FusedExpertMapping"):
        return ""
    name = GROUPED[1].replace("*", "0")
    mapping = importlib.import_module(_MAPPINGS).FusedExpertMapping(*GROUPED)
    toy, trained = grouped_model(_settings(), rank)
    return _differing("in one tensor", export(bridge(mapping), [toy], [name])[name], trained)


def _wrong_sequential(rank: int) -> str:
    import torch

    mapping = importlib.import_module(_MAPPINGS).AutoMapping(*SEQUENTIAL)
    toy, trained = sequential_model(_settings(), rank)
    try:
        got = export(bridge(mapping), [toy], [_named(expert) for expert in range(EXPERTS)])
    except ValueError:  # 0.3 cannot number them, and exports nothing
        return ""
    absent = [str(expert) for expert in range(EXPERTS) if _named(expert) not in got]
    if absent:
        return f"experts {', '.join(absent)} are not exported"
    return _differing("apart", torch.stack([got[_named(expert)] for expert in range(EXPERTS)]), trained)


def _named(expert: int) -> str:
    return SEQUENTIAL[1].replace("*", "0", 1).replace("*", str(expert))


def sequential_model(settings: Any, ep_rank: int) -> tuple[Any, Any]:
    """As `grouped_model`, with a RowParallelLinear an expert, as core's SequentialMLP has them."""
    import torch

    torch.manual_seed(ep_rank)
    linears = [adapt(dense_linear(settings), settings, is_expert=True) for _ in range(EXPERTS // RANKS)]
    toy = model(settings, "mlp.experts.local_experts.0.linear_fc2", linears[0])
    experts = toy.decoder.layers[0].mlp.experts.local_experts
    for number, linear in enumerate(linears[1:], 1):
        experts.add_module(str(number), torch.nn.Module())
        experts.get_submodule(str(number)).linear_fc2 = linear
    scale = ALPHA / RANK
    merged = [
        one.to_wrap.weight + scale * one.adapter.linear_out.weight @ one.adapter.linear_in.weight for one in linears
    ]
    return toy, torch.stack(merged).detach()


def _settings() -> Any:
    return config(num_moe_experts=EXPERTS, expert_model_parallel_size=RANKS)


def _differing(how: str, got: Any, local: Any) -> str:
    """Which experts of all ranks are not what was trained, as [experts, HIDDEN, INNER]; `local` is this rank's part."""
    import torch
    import torch.distributed as dist

    trained = [torch.empty_like(local) for _ in range(RANKS)]
    dist.all_gather(trained, local)
    wrong = [e for e, weight in enumerate(torch.cat(trained)) if not torch.allclose(got[e], weight, atol=1e-5)]
    if not wrong:
        return ""
    return f"{how}, experts {', '.join(map(str, wrong))} are not merged with their own adapter"


def _wrong_mamba(rank: int) -> str:
    import torch
    import torch.distributed as dist

    settings = config(tensor_model_parallel_size=RANKS, **MAMBA)
    toy, local = in_proj_model(settings, rank)
    mapping = importlib.import_module(_MAPPINGS).MambaInProjMapping(*IN_PROJ)
    name = IN_PROJ[1].replace("*", "0")
    got = export(bridge(mapping), [toy], [name])[name]
    parts = [torch.empty_like(local) for _ in range(RANKS)]
    dist.all_gather(parts, local)
    # Of each rank the rows of z, x, B, C and dt; Hugging Face has all z first, then all x.
    trained = torch.cat([torch.cat(rows) for rows in zip(*(part.split(_ROWS) for part in parts), strict=True)])
    wrong = int((~torch.isclose(got, trained, atol=1e-5)).any(1).sum())
    return f"{wrong} of {len(trained)} rows of Mamba's in_proj are not merged with their own" if wrong else ""


def in_proj_model(settings: Any, tp_rank: int) -> tuple[Any, Any]:
    """A rank's share of a Mamba in_proj under LoRA, and the merged weight as [rows / RANKS, HIDDEN]."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import ColumnParallelLinear

    torch.manual_seed(tp_rank)
    rows = RANKS * sum(_ROWS)
    linear = ColumnParallelLinear(
        HIDDEN,
        rows,
        config=settings,
        init_method=torch.nn.init.normal_,
        bias=False,
        gather_output=False,
        skip_bias_add=True,
    )
    wrapped = adapt(linear, settings, name="mixer.in_proj")
    low = wrapped.adapter.linear_in.weight.detach()
    shares = [torch.empty_like(low) for _ in range(RANKS)]
    dist.all_gather(shares, low)
    delta = ALPHA / RANK * wrapped.adapter.linear_out.weight @ torch.cat(shares)
    return model(settings, "mixer.in_proj", wrapped), (linear.weight + delta).detach()
