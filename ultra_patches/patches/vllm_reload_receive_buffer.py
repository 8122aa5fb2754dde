"""What is kept of a received weight is a reference to the transport's buffer, which the transport may write again."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ultra_patches import received
from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload import session
from ultra_patches.reload.session import Rule, seam
from ultra_patches.reload.toys import begin, finish, load, parameter, poisoned, record
from ultra_patches.reload.upstream import LAYERWISE

_TRANSFER = "vllm.distributed.weight_transfer"


def build_nccl(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def receive_weights(*args: Any, **kwargs: Any) -> None:
        # Each tensor, or each pack, is allocated for this one receipt.
        with received.own_copies():
            original(*args, **kwargs)

    return receive_weights


def build_ipc(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def receive_weights(self: Any, update_info: Any, *args: Any, **kwargs: Any) -> None:
        # The packed consumer clones since there is one (0.22); unpacked tensors are the trainer's memory.
        packed = getattr(update_info, "packed", None)
        with received.own_copies(bool(getattr(self, "packed", False) if packed is None else packed)):
            original(self, update_info, *args, **kwargs)

    return receive_weights


def probe() -> Finding:
    """Receive two weights of one layer through the same buffer."""
    import torch

    with poisoned(), torch.device("cpu"):
        layer = torch.nn.Module()
        layer.a, layer.b = parameter(2), parameter(2)
        record(layer)
        load(layer, [("a", torch.ones(2)), ("b", torch.ones(2))])
        buffer = torch.empty(2)
        begin(layer)
        for name, value in (("a", 2.0), ("b", 3.0)):
            load(layer, [(name, buffer.fill_(value))])
        finish(layer)
        first = layer.get_parameter("a")
    if first.tolist() == [2.0, 2.0]:
        return Finding(Verdict.CLEAN, "the first weight is 2.0 as sent, although its buffer was written again")
    return Finding(Verdict.DEFECT, f"sent 2.0 and then 3.0 through one buffer: the first is {first[0].item():.3g}")


PATCH = Patch(
    id="vllm-reload-receive-buffer",
    title="What was received is what is loaded, although the transport reuses its buffer",
    upstream="vllm",
    description=(
        "Until a layer is complete the reload keeps the tensors it was given, by reference. A transport that receives the "
        "next bucket into the same buffer, or hands over the trainer's own memory (unpacked CUDA IPC), changes them before "
        "they are used: layers that lie across two buckets get weights of other layers. With the patch they are copied "
        "when they have to be kept. NCCL and packed IPC give tensors of their own and are not copied; a transport of "
        "yours that does says so with `ultra_patches.received.own_copies()`."
    ),
    who="weight updates through a reused receive buffer, and unpacked CUDA IPC",
    origin="ultra-patches",
    bug="https://github.com/NVIDIA-NeMo/RL/pull/3651",
    upstream_pr="none",
    pr_state="packed CUDA IPC clones since 0.22.0; nothing proposed for the reload itself",
    removal="upstream's reload keeps copies of what it is given",
    last_checked="2026-11-30",
    variants=(
        Variant(
            "all",
            (
                Target(LAYERWISE, "make_online_process_loader", seam(session.loader, Rule.COPY)),
                Target(
                    f"{_TRANSFER}.nccl_engine", "NCCLWeightTransferEngine.receive_weights", build_nccl, optional=True
                ),
                Target(f"{_TRANSFER}.ipc_engine", "IPCWeightTransferEngine.receive_weights", build_ipc, optional=True),
            ),
        ),
    ),
    probe=probe,
    probe_after=(LAYERWISE,),
    over=(*Rule.COPY.over, "vllm-ipc-rank-layout"),
    report="docs/reports/vllm-reload-receive-buffer.md",
)
