"""Reload a real MambaMixer2, and toy layers, with whatever vLLM comes first on the path; print what arrived as JSON.

    PYTHONPATH=<sources of a release> VLLM_TARGET_DEVICE=cpu python reload_case.py [--late] [--force ID ...]

Memory that nobody wrote is NaN, so that a parameter which was never loaded cannot look right by chance. Parameters are
looked up once a session, before it loads, as every model's `load_weights` does: a second look-up would hide the defects.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RELOAD = "vllm.model_executor.model_loader.reload"
SSM = ("A", "D", "dt_bias")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--late", action="store_true", help="import the upstream first, as a vLLM worker does")
    parser.add_argument("--force", action="append", default=[], metavar="ID", help="set a patch past the gate")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = _case(late=options.late, force=options.force)
    result["complaints"] = [str(w.message) for w in caught if w.category.__name__ == "UltraPatchesWarning"]
    print("\n" + json.dumps(result))


def _case(*, late: bool, force: Sequence[str]) -> dict[str, Any]:
    if late:
        importlib.import_module(f"{RELOAD}.layerwise")
    import torch

    import ultra_patches

    reload: Any = importlib.import_module(RELOAD)
    for patch_id in force:
        _force(patch_id)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder, _process_group(Path(folder)) as new_mixer:
        made = {"mixer": new_mixer, "toy": _toy_mixer}
        result = {
            "orders": {kind: {n: _reloads(reload, make(), n) for n in ORDERS} for kind, make in made.items()},
            "partial": {first: _partial(reload, new_mixer(), first) for first in ("D", "conv1d.weight", "norm.weight")},
            # The second chunk begins in the middle of a layer.
            "two chunks": _one_session(reload, new_mixer(), parted_at=2),
            "views only": _one_session(reload, _views_only()),
            "buffers": _buffers(reload),
            # After the sessions, because it asks what is in force at their end.
            "bindings": _bindings("get_numel_loaded"),
            "status": {row.id: row.as_dict() for row in ultra_patches.status()},
            "version": sys.modules["vllm"].__version__,
            "files": [sys.modules[name].__file__ for name in (f"{RELOAD}.meta", f"{RELOAD}.layerwise")],
        }
        ultra_patches.revert("vllm-reload-numel-guard")
        result["reverted"] = {
            "bindings": _bindings("get_numel_loaded"),
            "orders": {name: _reloads(reload, _toy_mixer(), name) for name in ORDERS},
        }
    return result


def _order(first: Sequence[str], last: Sequence[str] = ()) -> Callable[[Sequence[str]], list[str]]:
    """Put some names first and some last; a name stands for every parameter inside it as well."""

    def inside(name: str, group: str) -> bool:
        return name == group or name.startswith(f"{group}.")

    def arrange(names: Sequence[str]) -> list[str]:
        ends = [*first, *last]
        middle = [name for name in names if not any(inside(name, group) for group in ends)]
        return [
            *[name for group in first for name in names if inside(name, group)],
            *middle,
            *[name for group in last for name in names if inside(name, group)],
        ]

    return arrange


ORDERS = {
    "A first": _order(("A", "D", "dt_bias")),
    "A middle": _order(("D", "A", "dt_bias")),
    "A last": _order((), ("D", "dt_bias", "A")),
    "conv1d first": _order(("conv1d", "dt_bias", "D", "A")),
    "conv1d last": _order(("A", "D", "dt_bias"), ("conv1d",)),
}


def _force(patch_id: str) -> None:
    """Set a patch where the gate would not: shows what the gate holds back."""
    from ultra_patches.core import apply, discover

    swaps: list[apply.Swap] = []
    for target in discover.patches()[0][patch_id].variants[0].targets:
        apply.apply(patch_id, importlib.import_module(target.module), target, swaps, decorated=True, late=True)
    apply.rebind(swaps)


def _bindings(name: str) -> dict[str, str]:
    """Every module of vLLM that binds a function by this name, with the file that the function's code is from."""
    modules = [(n, m) for n, m in list(sys.modules.items()) if n.startswith("vllm.") and name in vars(m)]
    return {n: Path(vars(m)[name].__code__.co_filename).name for n, m in modules}


@contextlib.contextmanager
def _process_group(folder: Path) -> Iterator[Callable[[], Any]]:
    """One gloo rank, and in it a function that makes a MambaMixer2 with weights of NemotronH's dtypes."""
    import torch
    import vllm.config
    import vllm.distributed
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    # On a CPU it packs the weight and frees the parameter; on a GPU, which the reload is made for, it does nothing.
    UnquantizedLinearMethod.process_weights_after_loading = lambda *_: None
    given: dict[str, Any] = {
        "hidden_size": 64, "ssm_state_size": 16, "conv_kernel_size": 4, "intermediate_size": 128, "use_conv_bias": True,
        "use_bias": False, "n_groups": 2, "num_heads": 8, "head_dim": 16, "rms_norm_eps": 1e-5, "activation": "silu",
        "use_rms_norm": True, "prefix": "mixer",
    }  # fmt: skip
    known = inspect.signature(MambaMixer2.__init__).parameters
    config = vllm.config.VllmConfig()

    def new_mixer() -> Any:
        config.compilation_config.static_forward_context.clear()
        torch.set_default_dtype(torch.bfloat16)
        try:
            mixer = MambaMixer2(**{name: value for name, value in given.items() if name in known})
        finally:
            torch.set_default_dtype(torch.float32)
        return mixer.requires_grad_(False)

    with vllm.config.set_current_vllm_config(config):
        vllm.distributed.init_distributed_environment(1, 0, (folder / "store").as_uri(), 0, backend="gloo")
        vllm.distributed.ensure_model_parallel_initialized(1, 1)
        yield new_mixer
        torch.distributed.destroy_process_group()


def _toy_mixer() -> Any:
    """The least that MambaMixer2 is made of, with vLLM's own loaders."""
    import torch
    from torch import nn
    from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader

    mixer = nn.Module()
    mixer.conv1d = nn.Linear(4, 6)
    mixer.conv1d.weight.data = mixer.conv1d.weight.data.unsqueeze(1)
    mixer.register_buffer("conv_weights", mixer.conv1d.weight.detach().view(6, 4), persistent=False)
    for name in SSM:
        mixer.register_parameter(name, nn.Parameter(torch.zeros(4)))
    mixer.A.weight_loader = composed_weight_loader(default_weight_loader, lambda x: -torch.exp(x.float()))
    mixer.norm = nn.LayerNorm(6)
    return mixer.requires_grad_(False)


def _checkpoint(model: Any, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in model.named_parameters()}


def _load(model: Any, checkpoint: dict[str, Any], names: Sequence[str]) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, checkpoint[name].clone())


def _start(reload: Any, model: Any, names: Sequence[str]) -> dict[str, Any]:
    """What vLLM does once: record, then the first load. Gives the checkpoint that it loaded."""
    checkpoint = _checkpoint(model, 0)
    reload.record_metadata_for_reloading(model)
    _load(model, checkpoint, names)
    return checkpoint


def _session(reload: Any, model: Any, checkpoint: dict[str, Any], *chunks: Sequence[str]) -> None:
    import torch

    reload.initialize_layerwise_reload(model)
    for names in chunks:
        _load(model, checkpoint, names)
    reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16, quantization=None))


def _wrong(model: Any, checkpoint: dict[str, Any]) -> list[str]:
    """The names of parameters that are not what was sent, by value, shape and dtype."""
    import torch

    found = dict(model.named_parameters())
    wrong = sorted(found.keys() ^ checkpoint.keys())
    for name, sent in checkpoint.items():
        expected = -torch.exp(sent.float()).to(sent.dtype) if name == "A" else sent
        parameter = found.get(name)
        if parameter is not None and (parameter.dtype is not sent.dtype or not _equal(parameter, expected)):
            wrong.append(name)
    return wrong


def _equal(tensor: Any, expected: Any) -> bool:
    import torch

    return not tensor.is_meta and torch.equal(tensor, expected)


def _look(model: Any, checkpoint: dict[str, Any], addresses: dict[str, int]) -> dict[str, Any]:
    """Everything that a reload may get wrong about a mixer."""
    view = model._buffers.get("conv_weights")
    weight = model.conv1d.weight
    return {
        "wrong": _wrong(model, checkpoint),
        "moved": sorted(n for n, p in model.named_parameters() if p.data_ptr() != addresses.get(n)),
        "is view": view is not None and view.data_ptr() == weight.data_ptr() == addresses["conv1d.weight"],
        "view right": view is not None and _equal(view, checkpoint["conv1d.weight"].reshape(view.shape)),
        "in state dict": "conv_weights" in model.state_dict(),
    }


def _addresses(model: Any) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def _reloads(reload: Any, model: Any, order: str) -> list[dict[str, Any]]:
    """Two rounds of whole reloads in one order, and what each left."""
    names = ORDERS[order]([name for name, _ in model.named_parameters()])
    _start(reload, model, names)
    addresses = _addresses(model)
    seen = []
    for seed in (1, 2):
        checkpoint = _checkpoint(model, seed)
        _session(reload, model, checkpoint, names)
        seen.append(_look(model, checkpoint, addresses))
    return seen


def _partial(reload: Any, model: Any, first: str) -> dict[str, Any]:
    """A session that carries one layer whole and no other: the layers it leaves out keep their weights."""
    names = [name for name, _ in model.named_parameters()]
    old, new = _start(reload, model, names), _checkpoint(model, 1)
    addresses = _addresses(model)
    owner = first.rpartition(".")[0]
    sent = [name for name in names if name.rpartition(".")[0] == owner]
    _session(reload, model, new, sent)
    return {"sent": sent, **_look(model, {**old, **{name: new[name] for name in sent}}, addresses)}


def _one_session(reload: Any, model: Any, *, parted_at: int | None = None) -> dict[str, Any]:
    """One whole reload, in two chunks where it is to be parted."""
    names = ORDERS["A first"]([name for name, _ in model.named_parameters()])
    _start(reload, model, names)
    addresses = _addresses(model)
    checkpoint = _checkpoint(model, 1)
    chunks = [names] if parted_at is None else [names[:parted_at], names[parted_at:]]
    _session(reload, model, checkpoint, *chunks)
    return _look(model, checkpoint, addresses)


def _views_only() -> Any:
    """A layer that holds a view of its child's weight and nothing of its own."""
    mixer = _toy_mixer()
    for name in SSM:
        delattr(mixer, name)
    return mixer


def _buffers(reload: Any) -> dict[str, Any]:
    """vllm-project/vllm#44371: a non-persistent buffer whose loader never runs, beside a buffer that is loaded."""
    import torch

    model = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
    model.register_buffer("untouched", torch.full((1,), 0.018798828125, dtype=torch.bfloat16), persistent=False)
    model.register_buffer("loaded", torch.zeros(2))
    reload.record_metadata_for_reloading(model)
    reload.initialize_layerwise_reload(model)
    for tensor in (model.weight, model.loaded):
        tensor.weight_loader(tensor, torch.full(tensor.shape, 3.0))
    reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16, quantization=None))
    # As text, because JSON has no NaN.
    return {name: repr(getattr(model, name).tolist()) for name in ("untouched", "loaded", "weight")}


if __name__ == "__main__":
    main()
