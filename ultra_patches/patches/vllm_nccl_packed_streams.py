"""Packed NCCL receipts are read on another stream than they arrive on, and nothing waits (vLLM up to 0.32)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict
from ultra_patches.reload.toys import poisoned

_MODULE = "vllm.distributed.weight_transfer.packed_tensor"
_NAMES = ("packed_nccl_broadcast_consumer", "packed_broadcast_consumer")


def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import torch

    signature = inspect.signature(original)

    def packed_nccl_broadcast_consumer(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        load = bound.arguments["post_unpack_func"]
        caller = torch.cuda.current_stream()

        def load_on_caller(tensors: Iterable[tuple[str, Any]]) -> None:
            # The receipt was issued on the slot's stream. What the loading keeps is read with a later pack, or when
            # the session ends; so everything is read on one stream, which waits for each receipt.
            caller.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(caller):
                kept = list(tensors)
                for _, tensor in kept:
                    # Or the allocator would hand its memory to the slot's next pack while a read is pending.
                    tensor.record_stream(caller)
                load(kept)

        bound.arguments["post_unpack_func"] = load_on_caller
        original(*bound.args, **bound.kwargs)

    return packed_nccl_broadcast_consumer


def probe() -> Finding:
    """Receive two packs on streams that are as late as a GPU may be; the first is read when the second has come."""
    import torch

    from ultra_patches.stand_ins.streams import Group, streams

    module = importlib.import_module(_MODULE)
    consume = next(getattr(module, name) for name in _NAMES if hasattr(module, name))
    getattr(getattr(module, "_get_streams", None), "cache_clear", lambda: None)()
    kept: list[Any] = []
    seen: list[float] = []

    def load(tensors: Iterable[tuple[str, Any]]) -> None:
        kept.extend(tensor for _, tensor in tensors)
        if len(kept) == 2:
            seen.extend(tensor[0].item() for tensor in kept)

    packs = [torch.full((4,), value).view(torch.uint8) for value in (2.0, 3.0)]
    with poisoned(), streams():
        meta = iter([("a", ([4], torch.float32)), ("b", ([4], torch.float32))])
        consume(iterator=meta, group=Group(packs), src=0, post_unpack_func=load, buffer_size_bytes=8, num_buffers=2)
    getattr(getattr(module, "_get_streams", None), "cache_clear", lambda: None)()
    if seen == [2.0, 3.0]:
        return Finding(Verdict.CLEAN, "both packs are as sent when the second is loaded")
    return Finding(Verdict.DEFECT, f"sent 2.0 and 3.0 in two packs; when the second is loaded they are {seen}")


PATCH = Patch(
    id="vllm-nccl-packed-streams",
    title="A packed NCCL receipt is read after it has arrived",
    upstream="vllm",
    description=(
        "The packed consumer receives each pack on a stream of its own and hands out views of it. The layerwise reload "
        "keeps views of a layer that is not complete and reads them when a later pack arrives, on that pack's stream, which "
        "does not wait for the first; and once they are freed the allocator may give their memory to the next pack while "
        "a read is pending. A layer that lies across two packs then gets whatever was in the memory."
    ),
    who="packed NCCL weight transfer in more than one pack",
    origin="ultra-patches",
    bug="no public report found; `packed_nccl_broadcast_consumer` of 0.33.0 chains events",
    upstream_pr="not found by number",
    pr_state="in 0.33.0",
    removal="vllm < 0.33 is no longer supported",
    last_checked="2026-11-30",
    variants=tuple(Variant(name, (Target(_MODULE, name, build),)) for name in _NAMES),
    probe=probe,
    probe_after=(_MODULE,),
    over=("vllm-packed-alignment",),
)
