"""Draw models of small layers and weight-update sessions, and compare with plain loading; print what failed as JSON.

    PYTHONPATH=<sources of a release> VLLM_TARGET_DEVICE=cpu python sessions_case.py [--examples N]

What is right is said by the same loaders on a model that knows no sessions. Memory that nobody wrote is NaN, and every tensor
is filled with NaN once its load call has returned, as a transport does that receives into one buffer.
"""

import argparse
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import nn

import ultra_patches
from ultra_patches.reload import toys as probes
from ultra_patches.reload.session import ATOMIC

RELOAD = "vllm.model_executor.model_loader.reload"
#: What a layer can hold. A name says how it behaves.
KINDS = (
    "plain", "composed", "stacked", "padded", "bias", "e_score_correction_bias",
    "table", "scratch", "shared", "late", "viewed", "copied", "cleared", "indexed", "negated",
)  # fmt: skip
#: Never sent.
BUFFERS = ("table", "scratch")


def _copied(param: Any, loaded: Any) -> None:
    param.data[:] = loaded


def _cleared(param: Any, loaded: Any) -> None:
    param.data.zero_()
    param.data.narrow(0, 0, 4).copy_(loaded)


def _indexed(param: Any, loaded: Any) -> None:
    param.data[torch.tensor([2, 0, 1])] = loaded


def _negated(param: Any, loaded: Any) -> None:
    param.data.copy_(loaded)
    param.data.neg_()


#: What the model writes past the loaders.
DIRECT = {"copied": _copied, "cleared": _cleared, "indexed": _indexed, "negated": _negated}


class Model(nn.Module):  # type: ignore[misc] # torch is not followed
    """Writes some of its parameters itself, as GPT-OSS does."""

    def load_weights(self, weights: Sequence[tuple[Any, ...]]) -> None:
        parameters = dict(self.named_parameters())
        for name, value, *shard in weights:
            write = DIRECT.get(name.rpartition(".")[2])
            if write is None:
                probes.load(self, [(name, value, *shard)])
            else:
                write(parameters[name], value)


@dataclass(frozen=True)
class Session:
    """What is sent, as (index into all there is to send), in load calls.

    One that is `abandoned` is never finished; one that is `atomic` takes nothing before its end.
    """

    calls: tuple[tuple[int, ...], ...]
    abandoned: bool
    atomic: bool


@st.composite
def models(draw: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    layer = st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True).map(tuple)
    return draw(st.lists(layer, min_size=1, max_size=3).map(tuple))


@st.composite
def sessions(draw: Callable[..., Any]) -> Session:
    numbers = st.integers(0, 31)
    calls = draw(st.lists(st.lists(numbers, max_size=8).map(tuple), min_size=1, max_size=4).map(tuple))
    abandoned = draw(st.booleans())
    # Only then is it said what an abandoned session leaves.
    return Session(calls, abandoned, abandoned or draw(st.booleans()))


def _composed(param: Any, loaded: Any) -> None:
    param.data.copy_(loaded)
    param.data.copy_(-torch.exp(param.float()))


def _stacked(param: Any, loaded: Any, shard: int) -> None:
    param.data.narrow(0, 2 * shard, 2).copy_(loaded)


def _padded(param: Any, loaded: Any) -> None:
    param.data[: loaded.shape[0]].copy_(loaded)


def build(layers: Sequence[Sequence[str]], *, record: bool) -> nn.Module:
    """A model whose every element is told from the others; `record` is what vLLM's loader does when it has made one."""
    model = Model()
    for number, kinds in enumerate(layers):
        layer = nn.Module()
        setattr(model, f"layer{number}", layer)
        for kind in kinds:
            _add(model, layer, kind)
    if record:
        probes.record(model)
    for layer, kinds in zip(list(model.children()), layers, strict=True):
        if "late" in kinds:
            layer.late = probes.parameter(3)
    value = 0.5
    for tensor in _tensors(model).values():
        tensor.data.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 8 + value)
        value += 1
    for layer in model.children():
        if hasattr(layer, "viewed"):
            assert layer.view.data_ptr() == layer.viewed.data_ptr()
    return model


def _add(model: nn.Module, layer: nn.Module, kind: str) -> None:
    if kind in BUFFERS:
        layer.register_buffer(kind, torch.zeros(3), persistent=kind == "table")
    elif kind == "shared":
        # The layers that have it have one.
        others = [other.shared for other in model.children() if "shared" in other._parameters]
        layer.shared = others[0] if others else probes.parameter(3)
    elif kind == "viewed":
        layer.viewed = probes.parameter(2, 1, 2)
        layer.register_buffer("view", layer.viewed.data.view(2, 2), persistent=False)
    elif kind != "late":
        layer.register_parameter(
            kind, probes.parameter(*{"stacked": (6,), "padded": (5,), "cleared": (5,)}.get(kind, (3,)))
        )
    loader = {"composed": _composed, "stacked": _stacked, "padded": _padded}.get(kind)
    if loader:
        layer.get_parameter(kind).weight_loader = loader


def _tensors(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if not n.endswith(".view")}


def sendable(model: nn.Module) -> list[tuple[Any, ...]]:
    """Everything a checkpoint has: name, shape, and the shard where there are some."""
    found: list[tuple[Any, ...]] = []
    for name, param in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind == "stacked":
            found += [(name, (2,), shard) for shard in range(3)]
        else:
            found.append((name, (4,) if kind in ("padded", "cleared") else tuple(param.shape)))
    return found


def check(layers: Sequence[Sequence[str]], wanted: Sequence[Session]) -> None:
    model, plain = build(layers, record=True), build(layers, record=False)
    everything = sendable(model)
    live = _all(model)
    objects = {name: (id(t), t.data_ptr()) for name, t in _all(model).items()}
    keys = set(model.state_dict())
    for number, session in enumerate(wanted):
        os.environ[ATOMIC] = "True" if session.atomic else "no"
        before = {name: tensor.clone() for name, tensor in live.items()}
        probes.begin(model)
        for call in session.calls:
            sent = [_value(everything[i % len(everything)], number) for i in call] if everything else []
            if not session.abandoned:
                plain.load_weights([(name, value.clone(), *shard) for name, value, *shard in _unique(sent)])
            model.load_weights(sent)
            for _, value, *_ in sent:
                value.fill_(torch.nan)
            if session.atomic:
                early = [name for name, tensor in live.items() if not torch.equal(tensor, before[name])]
                assert not early, f"{early} changed before the session ended"
        if not session.abandoned:
            probes.finish(model)
            _compare(model, plain, objects, keys)
    os.environ[ATOMIC] = "0"
    probes.begin(model)
    probes.finish(model)
    _compare(model, plain, objects, keys)


def _value(item: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    name, shape, *shard = item
    salt = sum(map(ord, name)) % 17 + 10 * sum(shard) + 100 * (number + 1)
    return (name, torch.arange(torch.Size(shape).numel()).reshape(shape) / 16 + salt / 128, *shard)


def _unique(sent: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list({(name, *shard): (name, value, *shard) for name, value, *shard in sent}.values())


def _all(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _compare(model: nn.Module, plain: nn.Module, objects: dict[str, Any], keys: set[str]) -> None:
    got, right = _all(model), _all(plain)
    assert got.keys() == right.keys(), f"tensors {sorted(got)}, wanted {sorted(right)}"
    for name, tensor in got.items():
        assert not tensor.is_meta, f"{name} has no memory"
        assert torch.equal(tensor, right[name]), f"{name} is {tensor.tolist()}, wanted {right[name].tolist()}"
        assert (id(tensor), tensor.data_ptr()) == objects[name], f"{name} has moved"
        loader = getattr(tensor, "weight_loader", None)
        assert getattr(loader, "__name__", "") != "online_process_loader", f"{name} has the session's loader"
    assert set(model.state_dict()) == keys, f"state dict {sorted(model.state_dict())}, wanted {sorted(keys)}"


def roots() -> dict[str, Any]:
    """Sessions of several models at once, and of a part of one, as frameworks have them that reload module by module.

    A router bias arrives after everything else, or belongs to two modules of which one is reloaded. All values end as 2.0.
    """

    def new(**names: Any) -> nn.Module:
        module = nn.Module()
        for name, value in names.items():
            setattr(module, name, value)
        return module

    def gate() -> nn.Module:
        return new(weight=probes.parameter(2), e_score_correction_bias=probes.parameter(2))

    found: dict[str, Any] = {}
    for title, count, inner in (("a leaf", 1, False), ("two leaves", 2, False), ("two with a layer", 2, True)):
        models = [new(layer=gate()) if inner else gate() for _ in range(count)]
        for model in models:
            probes.record(model)
        for step in (probes.begin, _all_twos, probes.finish):
            for model in models:
                step(model)
        found[title] = [_values(model) for model in models]
    router = gate()
    model = new(gate=router, experts=new(w=probes.parameter(2), e_score_correction_bias=router.e_score_correction_bias))
    probes.record(model)
    probes.begin(model.experts)
    _all_twos(model)
    probes.finish(model.experts)
    found["experts alone"] = [_values(model)]
    return found


def _all_twos(model: nn.Module) -> None:
    probes.load(model, [(name, torch.full((2,), 2.0)) for name, _ in model.named_parameters()])


def _values(model: nn.Module) -> dict[str, Any]:
    return {name: None if param.is_meta else param.tolist() for name, param in model.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=200)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    importlib.import_module(RELOAD)
    count = 0

    @hypothesis.settings(
        max_examples=options.examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(models(), st.lists(sessions(), min_size=1, max_size=3))
    def run(layers: Any, wanted: Any) -> None:
        nonlocal count
        count += 1
        check(layers, wanted)

    failure = None
    with probes.poisoned():
        several = roots()
        try:
            run()
        except Exception as error:  # noqa: BLE001 # whatever failed is the result
            failure = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    files = [sys.modules[f"{RELOAD}.{name}"].__file__ for name in ("meta", "layerwise")]
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print(
        "\n" + json.dumps({"examples": count, "failure": failure, "roots": several, "status": status, "files": files})
    )


if __name__ == "__main__":
    main()
