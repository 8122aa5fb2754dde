"""A packed transfer of mixed dtypes fails where a tensor begins at an odd byte."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant, Verdict

_MODULE = "vllm.distributed.weight_transfer.packed_tensor"


def build_unpack(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def unpack_tensor(
        packed_tensor: Any,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[Any],
        tensor_sizes: Sequence[int],
    ) -> list[tuple[str, Any]]:
        parts = packed_tensor.split(list(tensor_sizes))
        return [
            (name, _as(part, dtype, shape))
            for name, shape, dtype, part in zip(names, shapes, dtypes, parts, strict=True)
        ]

    return unpack_tensor


def _as(part: Any, dtype: Any, shape: Sequence[int]) -> Any:
    """A slice of bytes as a tensor: a view where its dtype can begin there, a copy elsewhere."""
    aligned = part.storage_offset() % dtype.itemsize == 0 and part.data_ptr() % dtype.itemsize == 0
    return (part if aligned else part.clone()).view(dtype).view(tuple(shape))


def build_consumer(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import torch

    signature = inspect.signature(original)

    def packed_broadcast_consumer(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        slots = [torch.cuda.Stream() for _ in range(given["num_buffers"])]
        packs: list[Any] = [None] * len(slots)
        for number, pack in enumerate(_packs(given["iterator"], given["buffer_size_bytes"])):
            slot = number % len(slots)
            slots[slot].synchronize()
            with torch.cuda.stream(slots[slot]):
                sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in pack]
                packs[slot] = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
                given["group"].broadcast(packs[slot], src=given["src"])
                parts = packs[slot].split(sizes)
                given["post_unpack_func"](
                    [(name, _as(part, dtype, shape)) for (name, shape, dtype), part in zip(pack, parts, strict=True)]
                )

    return packed_broadcast_consumer


def _packs(metadata: Iterator[tuple[str, Any]], limit: int) -> Iterator[list[tuple[str, Any, Any]]]:
    """Cut the metadata where the producer does: after the tensor that goes over the limit."""
    pack: list[tuple[str, Any, Any]] = []
    size = 0
    for name, (shape, dtype) in metadata:
        pack.append((name, shape, dtype))
        size += math.prod(shape) * dtype.itemsize
        if size > limit:
            yield pack
            pack, size = [], 0
    if pack:
        yield pack


def probe() -> Finding:
    """Receive three bf16 values, an empty tensor, a scalar and an fp32 router bias in one pack."""
    import torch

    from ultra_patches.stand_ins.streams import Group, streams

    module: Any = importlib.import_module(_MODULE)
    tensors = {
        "weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scale": torch.tensor(1.5),
        "e_score_correction_bias": torch.tensor([37.0001, -1.2345678]),
    }
    flat = [t.reshape(-1).view(torch.uint8) for t in tensors.values()]
    packed, shapes = torch.cat(flat), [list(t.shape) for t in tensors.values()]
    dtypes = [t.dtype for t in tensors.values()]
    got: dict[str, Any] = {}

    def load(received: list[tuple[str, Any]]) -> None:
        got.update((name, tensor.clone()) for name, tensor in received)

    try:
        if hasattr(module, "unpack_tensor"):
            got.update(module.unpack_tensor(packed, list(tensors), shapes, dtypes, [f.numel() for f in flat]))
        else:
            meta = zip(tensors, zip(shapes, dtypes, strict=True), strict=True)
            with streams():
                module.packed_broadcast_consumer(iterator=meta, group=Group([packed]), src=0, post_unpack_func=load)
    except (RuntimeError, TypeError) as error:
        return Finding(Verdict.DEFECT, f"a pack of bf16 x 3 before fp32: {str(error).splitlines()[0]}")
    wrong = [name for name, tensor in tensors.items() if name not in got or not torch.equal(got[name], tensor)]
    if wrong:
        return Finding(Verdict.DEFECT, f"not as sent: {', '.join(wrong)}")
    return Finding(Verdict.CLEAN, "mixed dtypes arrive as sent")


PATCH = Patch(
    id="vllm-packed-alignment",
    title="A packed transfer takes mixed dtypes in any order",
    upstream="vllm",
    description=(
        "Tensors are packed byte after byte. One whose dtype is wider than its offset allows cannot be viewed, so that an "
        "odd number of bf16 values before an fp32 router bias ends the update with `storage_offset() must be divisible by "
        "4`, in the middle of a session. Up to 0.30 a scalar fails as well. With the patch such a tensor is copied out of "
        "the pack; the others stay views."
    ),
    who="packed NCCL and IPC weight transfer of models with fp32 router biases, scales or odd sizes",
    origin="ultra-patches",
    bug="https://github.com/vllm-project/vllm/pull/57665",
    upstream_pr="https://github.com/vllm-project/vllm/pull/57665",
    pr_state="open",
    removal="upstream aligns offsets or copies",
    last_checked="2026-11-30",
    variants=(
        Variant("unpack_tensor", (Target(_MODULE, "unpack_tensor", build_unpack),)),
        Variant("consumer", (Target(_MODULE, "packed_broadcast_consumer", build_consumer),)),
    ),
    probe=probe,
    probe_after=(_MODULE,),
)
