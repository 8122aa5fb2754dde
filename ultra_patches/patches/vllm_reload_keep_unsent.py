"""What a session does not carry becomes uninitialised memory (vllm-project/vllm#48312 asks for more; not fixed)."""

from __future__ import annotations

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import load, parameter, poisoned, record, update
from ultra_patches.reload.upstream import LAYERWISE, META


def probe() -> Finding:
    """Reload a layer with a parameter that is not sent, buffers that no checkpoint has, padding, and a shared parameter."""
    import torch

    def three_of_four(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data[:3].copy_(loaded_weight)

    with poisoned(), torch.device("cpu"):
        model = torch.nn.Module()
        model.layer, model.other = torch.nn.Module(), torch.nn.Module()
        layer, other = model.layer, model.other
        layer.a, layer.b, layer.padded = parameter(2), parameter(2, value=1.0), parameter(4)
        layer.padded.weight_loader = three_of_four
        layer.register_buffer("table", torch.arange(3.0) + 5)
        layer.register_buffer("scratch", torch.arange(3.0) + 5, persistent=False)
        layer.shared, other.w = parameter(2), parameter(2)
        other.shared = layer.shared
        record(model)
        sent = [(f"layer.{n}", torch.full((s,), 2.0)) for n, s in (("a", 2), ("padded", 3), ("shared", 2))]
        sent.append(("other.w", torch.full((2,), 2.0)))
        load(model, sent)
        update(model, sent)
    wanted = {
        "b": [1.0, 1.0],
        "padded": [2.0, 2.0, 2.0, 0.0],
        "table": [5.0, 6.0, 7.0],
        "scratch": [5.0, 6.0, 7.0],
        "shared": [2.0, 2.0],
    }
    wrong = []
    for name, value in wanted.items():
        got = dict(layer.named_parameters()) | dict(layer.named_buffers())
        if name not in got or got[name].tolist() != value:
            wrong.append(f"{name} is {'gone' if name not in got else got[name].tolist()}")
    if other.shared is not layer.shared:
        wrong.append("the shared parameter is no longer one")
    if wrong:
        return Finding(Verdict.DEFECT, "; ".join(wrong))
    return Finding(Verdict.CLEAN, "parameter, padding, buffers and shared parameter keep what was not sent")


PATCH = Patch(
    id="vllm-reload-keep-unsent",
    title="What a weight update does not carry keeps its value",
    upstream="vllm",
    description=(
        "A layer of which a session carries only a part is finalized over uninitialised memory: parameters that were not "
        "sent, the padding of a padded parameter, buffers that no checkpoint has (non-persistent ones up to 0.25), and a "
        "parameter that is registered in two modules, of which only one is loaded, become garbage. Partial updates, LoRA or "
        "frozen parts, and one session a chunk all meet it. With the patch the rest keeps its values. Where a layer is "
        "repacked for its kernel, so that they cannot be kept, the update of that layer is refused before anything of it "
        "is overwritten, naming the layer and what is missing."
    ),
    who="weight updates that carry a part of a layer, and every model with buffers or padding that no checkpoint has",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/issues/48312",
    upstream_pr="https://github.com/vllm-project/vllm/pull/50523",
    pr_state="open, for padding alone; unloaded non-persistent buffers are kept since 0.26.0 (#44371)",
    removal="upstream keeps parameters, persistent buffers and padding that a session does not carry",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (Target(LAYERWISE, "_layerwise_process", seam(session.process, Rule.KEEP)),),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=Rule.KEEP.over,
    watches=(
        f"{META}:materialize_layer",
        f"{META}:restore_layer_on_meta",
        f"{LAYERWISE}:_copy_and_restore_kernel_tensors",
        f"{LAYERWISE}:_place_kernel_tensors",
    ),
)
