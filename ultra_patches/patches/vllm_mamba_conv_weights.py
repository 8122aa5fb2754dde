"""A buffer that is a view of a parameter is reloaded as if it were one, over that parameter (vllm-project/vllm#42481)."""

from __future__ import annotations

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import load, parameter, poisoned, record, update
from ultra_patches.reload.upstream import LAYERWISE, META


def probe() -> Finding:
    """Reload a layer built as MambaMixer2 is: the weight of a child, and a non-persistent view of it in the parent."""
    import torch

    with poisoned(), torch.device("cpu"):
        mixer = torch.nn.Module()
        mixer.conv1d = torch.nn.Module()
        mixer.conv1d.weight = parameter(6, 1, 4)
        mixer.D = parameter(3)
        mixer.register_buffer("conv_weights", mixer.conv1d.weight.view(6, 4), persistent=False)
        record(mixer)
        sent = [("D", torch.full((3,), 2.0)), ("conv1d.weight", torch.full((6, 1, 4), 2.0))]
        load(mixer, sent)
        update(mixer, sent)
        weight, view = mixer.conv1d.weight, mixer.get_buffer("conv_weights")
    if not torch.equal(weight, torch.full((6, 1, 4), 2.0)):
        return Finding(Verdict.DEFECT, f"conv1d.weight is {weight.flatten()[0].item():.3g}, sent was 2.0")
    if view.data_ptr() != weight.data_ptr():
        return Finding(Verdict.DEFECT, "conv_weights is no longer a view of conv1d.weight")
    if "conv_weights" in mixer.state_dict():
        return Finding(Verdict.DEFECT, "values right, but conv_weights has become part of the state dict")
    return Finding(Verdict.CLEAN, "conv1d.weight is 2.0 as sent, conv_weights its view")


PATCH = Patch(
    id="vllm-mamba-conv-weights",
    title="A view of a parameter stays a view during a reload",
    upstream="vllm",
    description=(
        "`MambaMixer2.conv_weights` is a non-persistent buffer that shares the memory of `conv1d.weight`. Up to 0.21 the "
        "reload treats it as a tensor of its own: no checkpoint carries it, so uninitialised memory is copied into it, and "
        "through it over `conv1d.weight`. From 0.22 the values are right, but the buffer comes back as a persistent one, "
        "so `state_dict()` and whatever saves from it carry a name that no checkpoint has."
    ),
    who="weight updates of models with Mamba2 layers (NemotronH, Bamba, FalconH1, Zamba2, …)",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/pull/42481",
    upstream_pr="https://github.com/vllm-project/vllm/pull/42481",
    pr_state="merged, values right since 0.22.0; persistence since 0.26.0 (#44371)",
    removal="vllm < 0.26 is no longer supported",
    last_checked="2026-11-29",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "initialize_layerwise_reload", seam(session.begin, Rule.VIEWS)),
                Target(META, "restore_layer_on_meta", seam(session.restore, Rule.VIEWS)),
                Target(LAYERWISE, "_place_kernel_tensors", seam(session.place, Rule.VIEWS)),
                Target(LAYERWISE, "finalize_layerwise_reload", seam(session.finish, Rule.VIEWS)),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=Rule.VIEWS.over,
    withdraw=Rule.VIEWS.withdraw,
    requires=("vllm-reload-numel-guard",),
    watches=(f"{META}:capture_layer_to_meta",),
)
