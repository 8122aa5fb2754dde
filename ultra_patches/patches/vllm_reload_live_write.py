"""Biases are written into the model in the middle of a session, and one of them keeps a loader that then loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.probes import LAYERWISE, META, begin, finish, load, parameter, poisoned, record, session

#: Address of a live parameter -> the parameter, and the copy that stands for it until the session ends.
_staged: dict[int, tuple[Any, Any]] = {}


def build_initialize(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def initialize_layerwise_reload(model: Any) -> None:
        _staged.clear()
        original(model)

    return initialize_layerwise_reload


def build_restore(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def restore_layer_on_meta(layer: Any, info: Any) -> None:
        original(layer, info)
        for name, live in layer._parameters.items():
            if live is not None and name in module.SKIP_TENSORS:
                # One that two modules share stays one.
                layer._parameters[name] = _staged.setdefault(id(live), (live, _copy(live)))[1]

    return restore_layer_on_meta


def build_finalize(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def finalize_layerwise_reload(model: Any, *args: Any, **kwargs: Any) -> None:
        # A session that was abandoned has given the live ones back, and its copies are worth nothing.
        is_open = any(module.get_layerwise_info(layer).can_load() for layer in model.modules())
        original(model, *args, **kwargs)
        if is_open:
            for name, live in model.named_parameters():
                # The others are counted, so that their layer has copied them, perhaps after processing.
                if name.rpartition(".")[2] in _never_counted(module) and id(live) in _staged:
                    live.data.copy_(_staged[id(live)][1])
        _staged.clear()

    return finalize_layerwise_reload


def _never_counted(module: ModuleType) -> Any:
    # In 0.20 to 0.26 the tensors that are never counted are those that are never moved.
    return getattr(module, "SKIP_LOAD_TENSORS", None) or module.SKIP_TENSORS


def _copy(live: Any) -> Any:
    copy = live.data.clone()
    copy.__class__ = live.__class__
    copy.__dict__ = vars(live).copy()
    return copy


def probe() -> Finding:
    """Look at two biases in the middle of a session, and load plainly after a session without them."""
    import torch

    two, five = torch.full((2,), 2.0), torch.full((2,), 5.0)
    with poisoned(), torch.device("cpu"):
        model = torch.nn.Module()
        model.layer, model.gate, model.other = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
        model.layer.weight, model.layer.bias, model.other.w = parameter(2), parameter(2), parameter(2)
        model.gate.weight, model.gate.e_score_correction_bias = parameter(2), parameter(2)
        record(model)
        live = {"bias": model.layer.bias, "e_score_correction_bias": model.gate.e_score_correction_bias}
        biases = [("layer.bias", two), ("gate.e_score_correction_bias", two)]
        begin(model)
        load(model, biases)
        early = [name for name, bias in live.items() if bias.tolist() != [0.0, 0.0]]
        load(model, [("layer.weight", two), ("gate.weight", two), ("other.w", two)])
        finish(model)
        lost = [name for name, bias in live.items() if bias.tolist() != [2.0, 2.0]]
        session(model, [("other.w", two)])
        load(model, [("layer.weight", five), ("layer.bias", five), ("gate.e_score_correction_bias", five)])
        stuck = [name for name, bias in live.items() if bias.tolist() != [5.0, 5.0]]
    said = (
        (early, "written into the model in mid-session"),
        (lost, "not what was sent"),
        (stuck, "not loaded by a plain load after a session without it"),
    )
    wrong = [f"{', '.join(names)}: {what}" for names, what in said if names]
    return Finding(Verdict.DEFECT, "; ".join(wrong)) if wrong else Finding(Verdict.CLEAN, "biases change at the end")


PATCH = Patch(
    id="vllm-reload-live-write",
    title="Biases are not written into the model before the session ends",
    upstream="vllm",
    description=(
        "The layerwise reload leaves some parameters where they are: `e_score_correction_bias` since 0.20 and `bias` since "
        "0.27. What a session sends for them is written into the running model at once, so that a session which fails, or "
        "generation in its middle, mixes new biases with old weights. `bias` also keeps the session's loader when its layer "
        "was not part of the session, and a plain `load_weights` afterwards drops it without a word."
    ),
    who="models with a router bias or with linear biases, wherever a session can fail or generation goes on meanwhile",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/pull/49586",
    upstream_pr="none",
    pr_state="not proposed; #38746 and #49586 brought it",
    affected=">=0.20.0",
    fixed_in=None,
    removal="upstream keeps back the tensors of SKIP_TENSORS as well",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "initialize_layerwise_reload", build_initialize),
                Target(META, "restore_layer_on_meta", build_restore),
                Target(LAYERWISE, "finalize_layerwise_reload", build_finalize),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=("vllm-mamba-conv-weights",),
    watches=(f"{LAYERWISE}:make_online_process_loader",),
)
