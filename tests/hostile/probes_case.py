"""Imports a file of the real vLLM as one of a nightly, and looks at torch the while.

Prints one line of JSON: what became of the patches, and what another thread saw.
"""

import importlib
import json
import threading

import torch

LEAF = "vllm.distributed.weight_transfer.packed_tensor"


def watch(stop, seen):
    stream = torch.cuda.Stream
    into, index, values = torch.zeros(4, dtype=torch.float32), torch.tensor([1, 2]), torch.ones(2, dtype=torch.float32)
    while not stop.is_set():
        seen["streams"] += torch.cuda.Stream is not stream
        try:
            into.put_(index, values)
            seen["written"] += 1
        except RuntimeError:
            seen["errors"] += 1


def main():
    seen = {"streams": 0, "errors": 0, "written": 0}
    stop = threading.Event()
    thread = threading.Thread(target=watch, args=(stop, seen))
    import ultra_patches
    from ultra_patches.core import lock

    empty = lock.Lock({}, {}, {})
    lock.load = lambda: empty
    thread.start()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    importlib.import_module(LEAF)
    stop.set()
    thread.join()
    state = [str(torch.get_default_dtype()), str(torch.empty(1).device), torch.are_deterministic_algorithms_enabled()]
    rows = {row.id: [row.state.value, row.reason] for row in ultra_patches.status()}
    print("\n" + json.dumps({"rows": rows, "thread": seen, "state": state}))


if __name__ == "__main__":
    main()
