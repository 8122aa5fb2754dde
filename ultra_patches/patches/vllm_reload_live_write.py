"""Biases are written into the model in the middle of a session, and one of them keeps a loader that then loads nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session as reload_session
from ultra_patches.reload.toys import LAYERWISE, META, begin, finish, load, parameter, poisoned, record, session


@dataclass(frozen=True)
class Staged:
    """A live parameter, the copy that stands for it until the session ends, and its value at the start."""

    live: Any
    copy: Any
    before: Any


#: Address of a live parameter -> the copy that stands for it, which two modules share as they share the parameter.
_copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def build_initialize(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def initialize_layerwise_reload(model: Any) -> None:
        for layer in model.modules():
            info = module.get_layerwise_info(layer)
            if not info.can_load():
                # Left by a session that nobody finished and nobody abandoned.
                reload_session.end(info)
        original(model)

    return initialize_layerwise_reload


def build_restore(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def restore_layer_on_meta(layer: Any, info: Any) -> None:
        original(layer, info)
        staged: dict[str, Staged] = {}
        for name, live in layer._parameters.items():
            if live is not None and name in module.SKIP_TENSORS:
                copy = _copies.get(id(live))
                if copy is None:
                    copy = _copies[id(live)] = _copy(live)
                staged[name] = Staged(live, copy, live.data.clone())
                layer._parameters[name] = copy
        if staged:
            info.ultra_staged = staged
            reload_session.at_end(info, lambda: _put_back(layer, info))

    return restore_layer_on_meta


def build_process(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _layerwise_process(layer: Any, info: Any) -> None:
        late = {name: s for name, s in _staged(info).items() if name in _never_counted(module)}
        for name, staged in late.items():
            # Upstream copies what stands here into the live one, and its weights may not have come yet.
            layer._parameters[name] = staged.live
        original(layer, info)
        for name, staged in late.items():
            layer._parameters[name] = staged.copy

    return _layerwise_process


def build_finalize(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def finalize_layerwise_reload(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        for layer in model.modules():
            info = module.get_layerwise_info(layer)
            for name, staged in _staged(info).items():
                # The others are counted, so that their layer has copied them, perhaps after processing. One that did
                # not change may have been loaded past this session.
                if name in _never_counted(module) and not staged.before.equal(staged.copy):
                    staged.live.data.copy_(staged.copy)
            reload_session.end(info)

    return finalize_layerwise_reload


def _staged(info: Any) -> dict[str, Staged]:
    found: dict[str, Staged] = vars(info).get("ultra_staged", {})
    return found


def _put_back(layer: Any, info: Any) -> None:
    for name, staged in vars(info).pop("ultra_staged", {}).items():
        if layer._parameters.get(name) is staged.copy:
            layer._parameters[name] = staged.live


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
    bug="not reported upstream; brought by #38746 and #49586",
    upstream_pr="none",
    pr_state="not proposed",
    removal="upstream keeps back the tensors of SKIP_TENSORS as well",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "initialize_layerwise_reload", build_initialize),
                Target(META, "restore_layer_on_meta", build_restore),
                Target(LAYERWISE, "_layerwise_process", build_process),
                Target(LAYERWISE, "finalize_layerwise_reload", build_finalize),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    report="docs/reports/vllm-reload-live-write.md",
    over=("vllm-mamba-conv-weights",),
    watches=(f"{LAYERWISE}:make_online_process_loader",),
)
