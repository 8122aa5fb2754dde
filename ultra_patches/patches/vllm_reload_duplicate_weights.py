"""A weight that is sent twice counts twice, so that its layer finishes before another has come (no upstream report)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session as reload_session
from ultra_patches.reload.toys import LAYERWISE, META, load, parameter, poisoned, record, session

#: What has been loaded of a parameter in this session, kept on the meta tensor that stands for it.
_LOADED = "ultra_loaded"

#: Not empty while a session ends.
_finalizing: list[Any] = []


def build_restore(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def restore_layer_on_meta(layer: Any, info: Any) -> None:
        original(layer, info)
        # The meta tensors are the same ones in every session.
        for tensor in module.get_layer_tensors(layer).values():
            vars(tensor).pop(_LOADED, None)

    return restore_layer_on_meta


def build_count(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import torch

    from ultra_patches.reload.regions import Loaded, Writes

    # Since 0.31 a parameter may say that some of its elements are padding which no checkpoint has.
    numel_of: Callable[..., int] = getattr(module, "get_tensor_load_numel", torch.Tensor.numel)

    writes = Writes()

    def get_numel_loaded(weight_loader: Callable[..., Any], args: Any) -> tuple[int, object]:
        param = args.arguments.get("param")
        if not isinstance(param, torch.Tensor):
            counted: tuple[int, object] = original(weight_loader, args)
            return counted
        loaded: Loaded | None = getattr(param, _LOADED, None)
        if loaded is None:
            loaded = Loaded()
            setattr(param, _LOADED, loaded)
        before = loaded.numel
        with writes.of(param):
            value = weight_loader(*args.args, **args.kwargs)
        loaded.add(writes.regions)
        limit = numel_of(param)
        return min(loaded.numel, limit) - min(before, limit), value

    return get_numel_loaded


def build_process(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _layerwise_process(layer: Any, info: Any) -> None:
        waiting = dict(layer._parameters) if reload_session.is_waiting(info) else None
        original(layer, info)
        is_processed = isinstance(getattr(layer, "quant_method", None), module.QuantizeMethodBase)
        if waiting is None or reload_session.is_waiting(info) or not is_processed or _finalizing:
            return
        # What still comes for this layer would be written over what its kernel computes with, or find no parameter. The
        # parameters that were waiting drop it.
        info.ultra_done = dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters.update(waiting)
        reload_session.at_end(info, lambda: _put_back(layer, info))

    return _layerwise_process


def build_finalize(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def finalize_layerwise_reload(model: Any, *args: Any, **kwargs: Any) -> None:
        # First, because attention layers are processed in here, some of them with the weights of others.
        for layer in model.modules():
            _put_back(layer, module.get_layerwise_info(layer))
        _finalizing.append(model)
        try:
            original(model, *args, **kwargs)
        finally:
            _finalizing.clear()

    return finalize_layerwise_reload


def _put_back(layer: Any, info: Any) -> None:
    done = vars(info).pop("ultra_done", None)
    if done is not None:
        layer._parameters.clear()
        layer._parameters.update(done)


def probe() -> Finding:
    """Reload a layer of two parameters, the first sent twice, and one whose halves are sent as q, q and k."""
    import torch

    def halves(param: torch.Tensor, loaded_weight: torch.Tensor, shard: int = 0) -> None:
        param.data.narrow(0, 2 * shard, 2).copy_(loaded_weight)

    def new() -> Any:
        layer = torch.nn.Module()
        layer.a, layer.b, layer.qk = parameter(4), parameter(4), parameter(4)
        layer.qk.weight_loader = halves
        record(layer)
        return layer

    two, ones = torch.full((4,), 2.0), torch.full((2,), 2.0)
    with poisoned(), torch.device("cpu"):
        whole, sharded = new(), new()
        qk: list[tuple[Any, ...]] = [("qk", ones, 0), ("qk", ones, 1)]
        for layer in (whole, sharded):
            load(layer, [("a", two), ("b", two), *qk])
        session(whole, [("a", two), ("a", two), *qk, ("b", two)])
        session(sharded, [("a", two), ("b", two), ("qk", ones, 0), ("qk", ones, 0), ("qk", ones, 1)])
    for sent, layer, name in (("a", whole, "b"), ("the first shard of qk", sharded, "qk")):
        last = layer.get_parameter(name)
        if not torch.equal(last, two):
            return Finding(Verdict.DEFECT, f"{sent} sent twice: {name} ends with {last[-1].item():.3g}, sent was 2.0")
    return Finding(Verdict.CLEAN, "all are 2.0 as sent, also where one was sent twice")


PATCH = Patch(
    id="vllm-reload-duplicate-weights",
    title="A weight that is sent twice in a session counts once",
    upstream="vllm",
    description=(
        "The layerwise reload finishes a layer when as many elements were loaded as it has. It adds up what each call "
        "loads and does not remember which, so a parameter or shard that is sent twice stands for another that has not "
        "come: the layer is finalized with uninitialised memory in place of that one, and what then comes is dropped. Tied "
        "embeddings, a retried bucket or two overlapping chunks are enough. No error, no warning. A weight that is sent again when "
        "its layer is complete is written over what a repacked layer computes with; with the patch it is dropped there."
    ),
    who="weight updates in which a name or a shard of it may come more than once",
    origin="ultra-patches",
    bug="not reported upstream",
    upstream_pr="https://github.com/vllm-project/vllm/pull/51378",
    pr_state="open: would replace counting by whole-model transactions",
    removal="upstream counts each element once",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(META, "restore_layer_on_meta", build_restore),
                Target(META, "get_numel_loaded", build_count),
                Target(LAYERWISE, "_layerwise_process", build_process),
                Target(LAYERWISE, "finalize_layerwise_reload", build_finalize),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    report="docs/reports/vllm-reload-duplicate-weights.md",
    over=("vllm-mamba-conv-weights", "vllm-reload-numel-guard"),
    watches=(f"{LAYERWISE}:make_online_process_loader",),
)
