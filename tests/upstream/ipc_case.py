"""Run transfer scenarios on one release, in a process of its own; prints one line of JSON.

usage: python ipc_case.py on|off|worker-off SCENARIO…     (`worker-off`: patched trainers, workers as released)
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

if sys.argv[1] == "off":
    os.environ["ULTRA_PATCHES"] = "off"
import ultra_patches
from ultra_patches.core import apply
from ultra_patches.transfer import probe as probe_ipc

Weights = list[tuple[str, Any]]


def fill(names: str, rank: int, sizes: dict[str, int] | None = None) -> Weights:
    """fp32 vectors of 4 elements (or as given) whose values name the parameter and the rank."""
    import torch

    return [(n, torch.full(((sizes or {}).get(n, 4),), 10.0 * (ord(n) - ord("a") + 1) + rank)) for n in names]


def scenarios() -> dict[str, list[Weights]]:
    import torch

    def typed(rank: int, *dtypes: Any) -> Weights:
        return [(f"w{i}", torch.full((3,), rank + i + 1).to(d)) for i, d in enumerate(dtypes)]

    return {
        "same": [fill("abcd", 0), fill("abcd", 1)],
        "order": [fill("abcd", 0), fill("bacd", 1)],
        "shape": [fill("abcd", 0), fill("abcd", 1, {"a": 2, "b": 6})],
        "fewer": [fill("abcd", 0), fill("abc", 1)],
        "more": [fill("abc", 0), fill("abcde", 1)],
        "chunks": [fill("abcd", 0), fill("abcd", 1, {"b": 6})],
        "nchunks": [fill("abcd", 0), fill("abcdefg", 1, {"c": 8})],
        "three": [fill("abcd", 0), fill("bacd", 1), fill("abcd", 2)],
        "none": [fill("abcd", 0), []],
        "dtypes": [
            typed(0, torch.float32, torch.bfloat16, torch.bfloat16, torch.int64, torch.uint8)[:3],
            typed(1, torch.float32, torch.float32, torch.bfloat16),
        ],
        "twice": [fill("abcd", 0), [*fill("ab", 1), *fill("a", 1)]],
        "misaligned": [fill("abcd", 0), typed(1, torch.bfloat16, torch.float32)],
    }


def failing(weights: Weights) -> Any:
    yield weights[0]
    raise RuntimeError("exporter broke")


def wait(name: str, packed: bool) -> float:
    """Seconds that a rank waits for another: few only where ranks as released wait for each other without end."""
    return 8.0 if sys.argv[1] == "off" and packed and name in ("chunks", "shape") else 60.0


def run(name: str, packed: bool) -> dict[str, Any]:
    seconds = wait(name, packed)
    if name == "raises":
        sent = [fill("abcd", 0), fill("abcd", 1)]
        outcome = probe_ipc.transfer([sent[0], Raising(sent[1])], packed=packed, seconds=seconds)
    else:
        sent = scenarios()[name]
        # 40 bytes hold two of the four-element vectors, so there are several chunks.
        outcome = probe_ipc.transfer(sent, packed=packed, buffer_bytes=40, seconds=seconds)
    return {
        "wrong": outcome.wrong(sent),
        "errors": outcome.errors,
        "trainers": outcome.trainers,
        "messages": [plain(m) for m in outcome.messages],
        "received": [len(r) for r in outcome.received],
    }


class Raising(list[Any]):
    """Yields one parameter and then fails, as an exporter does that runs out of memory.

    From 0.27 on the parameters are described before they are sent, which takes one healthy pass.
    """

    passes = 0

    def __iter__(self) -> Any:
        import vllm.distributed.weight_transfer.ipc_engine as engine

        self.passes += 1
        whole = list(super().__iter__())
        healthy = self.passes == 1 and hasattr(engine, "IPCTrainerWeightTransferEngine")
        return iter(whole) if healthy else failing(whole)


def plain(value: Any) -> Any:
    """A message without the folder of its shared files; tuples stay distinguishable from lists."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [plain(v) for v in value]}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return Path(value).name if isinstance(value, str) and os.sep in value else repr(value)


def main() -> None:
    import vllm.distributed.weight_transfer.ipc_engine as engine

    if sys.argv[1] == "worker-off":
        place = apply.resolve(engine, "IPCWeightTransferEngine.receive_weights")
        setattr(place.owner, place.attribute, inspect.unwrap(place.function))
    results: dict[str, Any] = {}
    for word in sys.argv[2:]:
        name, _, mode = word.partition(":")
        results[word] = run(name, mode == "packed")
    status = {r.id: r.state.value for r in ultra_patches.status()}
    print("\n" + json.dumps({"file": engine.__file__, "status": status, "results": results}))


if __name__ == "__main__":
    main()
