"""What a model's `load_weights` writes past the weight loaders is lost in a session (vllm-project/vllm#57795)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import load, parameter, poisoned, record
from ultra_patches.reload.upstream import LAYERWISE


def probe() -> Finding:
    """Update a model that writes its parameters by a loader, by copies of any form, and by arithmetic in place."""
    import importlib

    import torch

    layerwise: Any = importlib.import_module(LAYERWISE)
    with poisoned(), torch.device("cpu"):
        model = _model()
        record(model)
        sent = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
        model.load_weights(sent.items())
        addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
        layerwise.initialize_layerwise_reload(model)
        model.load_weights((name, value * 2) for name, value in sent.items())
        layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=None, quantization=None))
    wanted = dict.fromkeys(sent, 2.0) | {"alone.log": -2.0}
    wrong = [
        f"{name} is {param.tolist()}, not {wanted[name]}"
        for name, param in model.named_parameters()
        if not bool((param == wanted[name]).all())
    ]
    wrong += [f"{name} has moved" for name, param in model.named_parameters() if param.data_ptr() != addresses[name]]
    if wrong:
        return Finding(Verdict.DEFECT, "; ".join(wrong))
    return Finding(Verdict.CLEAN, "what is written past the weight loaders is in the model after the session")


def _model() -> Any:
    import torch

    def sinks(param: torch.Tensor, value: torch.Tensor) -> None:
        param.data.zero_()
        param.data.narrow(0, 0, 2).copy_(value[:2])
        param.data[2:] = value[2:]

    def rows(param: torch.Tensor, value: torch.Tensor) -> None:
        param.data[torch.tensor([1, 0])] = value.flip(0)

    def log(param: torch.Tensor, value: torch.Tensor) -> None:
        param.data.copy_(value)
        param.data.neg_()

    class Model(torch.nn.Module):  # type: ignore[misc] # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.mixed, self.alone = torch.nn.Module(), torch.nn.Module()
            self.mixed.weight, self.mixed.sinks = parameter(2), parameter(4)
            self.alone.rows, self.alone.log, self.alone.put = parameter(2, 2), parameter(2), parameter(2)

        def load_weights(self, weights: Any) -> None:
            writes = {"mixed.sinks": sinks, "alone.rows": rows, "alone.log": log}
            for name, value in weights:
                if name in writes:
                    writes[name](self.get_parameter(name), value)
                elif name == "alone.put" and self.alone.put.is_meta:
                    self.alone.put = torch.nn.Parameter(value, requires_grad=False)
                else:
                    load(self, [(name, value)])

    return Model()


PATCH = Patch(
    id="vllm-reload-direct-writes",
    title="What a model writes past its weight loaders arrives",
    upstream="vllm",
    description=(
        "In a session the layers have tensors without memory, and only what goes through a parameter's `weight_loader` is "
        "kept for them. What a model's `load_weights` writes itself, with `copy_`, `data[...] =`, `index_copy_`, `.data =` or "
        "arithmetic in place, is lost, and the layer has its old values or none after a session that ended well: all experts, "
        "expert biases and sinks of GPT-OSS in bf16, and some twenty other models. With the patch each such operation is kept "
        "and done again on the layer's new tensors, in the order in which it was written, or the update is refused with an "
        "error that names the tensor and the operation."
    ),
    who="weight updates of GPT-OSS, Step-3 and every other model that writes parameters in its `load_weights`",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/issues/57795",
    upstream_pr="none",
    pr_state="the RFC counts some twenty such places; some are rewritten one by one (#57797 to #57806)",
    removal="no model of upstream writes past the loaders, or its reload sees what they write",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "initialize_layerwise_reload", seam(session.begin, Rule.DIRECT)),
                Target(LAYERWISE, "make_online_process_loader", seam(session.loader, Rule.DIRECT)),
                Target(LAYERWISE, "_layerwise_process", seam(session.process, Rule.DIRECT)),
                Target(LAYERWISE, "finalize_layerwise_reload", seam(session.finish, Rule.DIRECT)),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=Rule.DIRECT.over,
    withdraw=Rule.DIRECT.withdraw,
)
