"""Sessions of a small model that writes past its loaders in ways that cannot be done later, or fails; prints JSON.

PYTHONPATH=<sources of a release> VLLM_TARGET_DEVICE=cpu python direct_case.py
"""

import gc
import importlib
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ultra_patches
from ultra_patches.reload import toys as probes

RELOAD = "vllm.model_executor.model_loader.reload"


def _set(layer: Any, value: Any) -> None:
    layer.weight.data.set_(value)


def _several(layer: Any, value: Any) -> None:
    torch._foreach_copy_([layer.weight.data, layer.bias_like.data], [value, value])


def _computed(layer: Any, value: Any) -> None:
    layer.weight.data.copy_(layer.bias_like.data * 2 + value)


def _outside(layer: Any, value: Any) -> None:
    layer.weight.data.narrow(0, 3, 2).copy_(value[:2])


def _other_shape(layer: Any, value: Any) -> None:
    layer.weight.data.copy_(value[:3])


def _other_memory(layer: Any, value: Any) -> None:
    layer.weight.data = value


def _another(layer: Any, value: Any) -> None:
    layer.weight = nn.Parameter(value.repeat(2), requires_grad=False)


def _raises(layer: Any, value: Any) -> None:
    layer.weight.data.copy_(value)
    raise KeyError("no such expert")


def _other_dtype(layer: Any, value: Any) -> None:
    layer.weight.data.copy_(value.double())


def _bytes(layer: Any, value: Any) -> None:
    layer.weight.data.view(torch.uint8).copy_(value.view(torch.uint8))


def _slices(layer: Any, value: Any) -> None:
    layer.weight.data[::2] = value[::2]
    layer.weight.data.index_copy_(0, torch.tensor([3, 1]), value[[3, 1]])


def _added(layer: Any, value: Any) -> None:
    layer.weight.data.fill_(1.0)
    layer.weight.data.add_(value).sub_(1.0)


def _own_part(layer: Any, value: Any) -> None:
    layer.weight.data[:2] = value[:2]
    layer.weight.data[2:].copy_(layer.weight.data[:2])


REFUSED = {
    f.__name__[1:]: f for f in (_set, _several, _computed, _outside, _other_shape, _other_memory, _another, _raises)
}
TAKEN = {f.__name__[1:]: f for f in (_other_dtype, _bytes, _slices, _added, _own_part)}


class Model(nn.Module):  # type: ignore[misc] # torch is not followed
    """One layer, one of whose parameters is written by `write`, and one that a loader writes."""

    def __init__(self, write: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Module(), write
        self.layer.weight, self.layer.bias_like = probes.parameter(4), probes.parameter(4)

    def load_weights(self, weights: Any) -> None:
        for name, value in weights:
            if name == "layer.weight":
                self.write(self.layer, value)
            else:
                probes.load(self, [(name, value)])


def session(write: Callable[[Any, Any], None]) -> dict[str, Any]:
    """One update to 2.0 of what is 0.0."""
    model = Model(write)
    probes.record(model)
    said = None
    try:
        probes.begin(model)
        model.load_weights([("layer.bias_like", torch.full((4,), 2.0)), ("layer.weight", torch.full((4,), 2.0))])
        probes.finish(model)
    except Exception as error:  # noqa: BLE001 # what it is, is the result
        said = [type(error).__name__, str(error)]
        # As a worker does that fails.
        probes.begin(model)
        probes.finish(model)
    values = {name: None if param.is_meta else param.tolist() for name, param in model.named_parameters()}
    return {"said": said, "values": values, "left": "load_weights" in vars(model)}


def left_over() -> int:
    """How many models of failed sessions that nobody ended are kept alive."""
    import weakref

    models = [Model(_raises) for _ in range(3)]
    alive = [weakref.ref(model) for model in models]
    for model in models:
        probes.record(model)
        probes.begin(model)
    del models, model
    gc.collect()
    return sum(ref() is not None for ref in alive)


def main() -> None:
    logging.disable(logging.WARNING)
    importlib.import_module(RELOAD)
    with probes.poisoned():
        result = {
            "refused": {name: session(write) for name, write in REFUSED.items()},
            "taken": {name: session(write) for name, write in TAKEN.items()},
            "left over": left_over(),
        }
    files = [sys.modules[f"{RELOAD}.{name}"].__file__ for name in ("meta", "layerwise")]
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    print("\n" + json.dumps({**result, "status": status, "files": files}))


if __name__ == "__main__":
    main()
