"""How sessions end, and what is left of them: on toy layers with real reload functions; prints what was seen as JSON.

PYTHONPATH=<sources of a release> VLLM_TARGET_DEVICE=cpu python endings_case.py
"""

import gc
import importlib
import json
import logging
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import ultra_patches
from ultra_patches.reload import session
from ultra_patches.reload import toys as probes

RELOAD = "vllm.model_executor.model_loader.reload"
WORKER = "vllm.v1.worker.gpu_worker"
BIAS = "e_score_correction_bias"


def twos(*names: str, value: float = 2.0) -> list[tuple[str, Any]]:
    return [(name, torch.full((2,), value)) for name in names]


class Model(nn.Module):  # type: ignore[misc] # torch is not followed
    """Loads as every model of vLLM does."""

    def load_weights(self, weights: Any) -> None:
        probes.load(self, list(weights))


def router() -> nn.Module:
    """A gate with a router bias, and a layer beside it."""
    model = Model()
    model.gate, model.other = nn.Module(), nn.Module()
    model.gate.weight, model.gate.e_score_correction_bias = probes.parameter(2), probes.parameter(2)
    model.other.w = probes.parameter(2)
    for param in model.parameters():
        param.weight_loader = rows
    probes.record(model)
    return model


def rows(param: Any, loaded: Any) -> None:
    param.data[: len(loaded)].copy_(loaded)


def values(model: nn.Module) -> dict[str, Any]:
    return {name: None if param.is_meta else param.tolist() for name, param in model.named_parameters()}


def bias_of_a_failed_session() -> Any:
    """Session 1 sends a bias of 9.0 and fails, and its exception is kept; session 2 does not carry the bias."""
    model, kept = router(), []
    probes.begin(model)
    try:
        params = dict(model.named_parameters())
        probes.load(model, twos(f"gate.{BIAS}", value=9.0))
        raise_here()
    except RuntimeError as error:  # its traceback keeps the tensors of its frames
        kept = [error, params]
    probes.update(model, twos("gate.weight", "other.w"))
    return [len(kept), values(model)[f"gate.{BIAS}"]]


def raise_here() -> None:
    raise RuntimeError("the transport died")


def bias_that_was_set_in_between() -> Any:
    """The parameters of session 1 are kept, the bias is set to 5.0, and session 2 does not carry it."""
    model = router()
    probes.begin(model)
    kept = dict(model.named_parameters())
    probes.load(model, twos("gate.weight", f"gate.{BIAS}", "other.w", value=9.0))
    probes.finish(model)
    probes.load(model, twos(f"gate.{BIAS}", value=5.0))
    probes.update(model, twos("gate.weight", "other.w"))
    return [len(kept), values(model)[f"gate.{BIAS}"]]


def parts_that_overlap() -> Any:
    """Rows 0:6 and 0:3 of 8 are sent, then the other parameter. Rows 6:8 were 1.0."""
    layer = nn.Module()
    layer.a, layer.b = probes.parameter(8, 2, value=1.0), probes.parameter(3, value=1.0)
    layer.a.weight_loader = rows
    probes.record(layer)
    probes.update(layer, [("a", torch.full((6, 2), 2.0)), ("a", torch.full((3, 2), 3.0)), ("b", torch.full((3,), 2.0))])
    return [layer.a[:, 0].tolist(), layer.b.tolist()]


def two_models(fails: Callable[[nn.Module], None]) -> Any:
    """A session of one model is open while one of another fails; then the first goes on."""
    one, other = router(), router()
    probes.begin(one)
    probes.load(one, twos("gate.weight", value=3.0))
    said = raised(fails, other)
    probes.load(one, twos(f"gate.{BIAS}", "other.w", value=3.0))
    probes.finish(one)
    return {"raised": said, "open": values(one), "failed": values(other)}


def raised(fails: Callable[[nn.Module], None], model: nn.Module) -> str:
    try:
        fails(model)
    except (RuntimeError, KeyboardInterrupt) as error:
        return type(error).__name__
    return "nothing"


def fails_at_its_end(model: nn.Module) -> None:
    """A layer of which a part was sent cannot be processed."""
    layerwise = importlib.import_module(f"{RELOAD}.layerwise")

    class Broken(layerwise.QuantizeMethodBase):  # type: ignore[misc] # upstreams are not followed
        create_weights = apply = None

        def process_weights_after_loading(self, layer: Any) -> None:
            raise RuntimeError("a layer that cannot be processed")

    Broken.__abstractmethods__ = frozenset()
    probes.begin(model)
    model.other.quant_method = Broken()
    probes.load(model, [("gate.weight", torch.full((2,), 2.0)), ("other.w", torch.full((1,), 2.0))])
    try:
        probes.finish(model)
    finally:
        del model.other.quant_method


def fails_in_a_worker(model: nn.Module, error: type[BaseException] = RuntimeError) -> None:
    """vLLM's own Worker receives, and its transport dies."""

    def die(*_: Any, **__: Any) -> None:
        raise error("the transport died")

    engine = SimpleNamespace(
        model=model, parse_update_info=lambda info: info, receive_weights=die, update_weights=die,
        reset_weight_update_target=lambda: setattr(engine, "model", None),
    )  # fmt: skip
    worker = object.__new__(importlib.import_module(WORKER).Worker)
    worker.weight_transfer_engine = engine
    worker.model_runner = SimpleNamespace(model=model, get_model=lambda: model)
    worker.vllm_config = importlib.import_module("vllm.config").VllmConfig()
    worker.model_config, worker.device = SimpleNamespace(dtype=None, quantization=None), torch.device("cpu")
    worker._weight_update_active = worker._is_checkpoint_format = True
    worker._weight_update_is_draft = False
    probes.begin(model)
    probes.load(model, twos("gate.weight"))
    worker.update_weights(SimpleNamespace(is_checkpoint_format=True))


def interrupted(model: nn.Module) -> None:
    fails_in_a_worker(model, KeyboardInterrupt)


def left_after(end: Callable[[nn.Module], Any]) -> Any:
    """What sessions keep of layers while one is open, and after it ended in this way."""
    model = router()
    model.view = nn.Module()
    model.view.weight = probes.parameter(2, 2)
    model.view.register_buffer("flat", model.view.weight.data.view(4), persistent=False)
    probes.record(model)
    probes.begin(model)
    probes.load(model, twos("gate.weight", f"gate.{BIAS}"))
    during = kept()
    said = raised(end, model)
    return {"raised": said, "during": during, "after": kept()}


def kept() -> int:
    """How many objects a session has anywhere in this process."""
    gc.collect()
    kinds = (session.Session, session.LayerState, session.Staged)
    return session.open_layers() + sum(isinstance(thing, kinds) for thing in gc.get_objects())


def begins_again(model: nn.Module) -> None:
    probes.begin(model)
    probes.finish(model)


def reverts(model: nn.Module) -> None:
    for patch_id in [row.id for row in ultra_patches.status() if "reload" in row.id or "mamba-conv" in row.id]:
        if next(row for row in ultra_patches.status() if row.id == patch_id).state.value.startswith("applied"):
            ultra_patches.revert(patch_id)
    probes.load(model, twos("gate.weight", f"gate.{BIAS}", "other.w"))
    probes.load(model, [("view.weight", torch.full((2, 2), 2.0))])
    probes.finish(model)


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    importlib.import_module(RELOAD)
    result: dict[str, Any] = {}
    with probes.poisoned():
        result["bias of a failed session"] = bias_of_a_failed_session()
        result["bias that was set in between"] = bias_that_was_set_in_between()
        result["parts that overlap"] = parts_that_overlap()
        result["two models"] = {
            name: two_models(fails)
            for name, fails in (("end", fails_at_its_end), ("worker", fails_in_a_worker), ("interrupted", interrupted))
        }
        if any(row.state.value == "applied" for row in ultra_patches.status()):
            ends = {
                "finished": probes.finish,
                "failed": fails_at_its_end,
                "interrupted": interrupted,
                "begun again": begins_again,
                "reverted": reverts,
            }
            result["left"] = {name: left_after(end) for name, end in ends.items()}
    files = [sys.modules[f"{RELOAD}.{name}"].__file__ for name in ("meta", "layerwise")]
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print("\n" + json.dumps({**result, "status": status, "files": files}))


if __name__ == "__main__":
    main()
