"""Ranks of which one fails, and messages that are not as they should be, on one release; prints one line of JSON.

The overlay is armed, used, reverted, and the same is done on the release as it is.
usage: python transfer_case.py      with the sources of the release on PYTHONPATH
"""

from __future__ import annotations

import collections
import copy
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import queue
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ultra_patches
from ultra_patches.stand_ins.ipc import CpuIpc
from ultra_patches.transfer import probe as probe_ipc

#: What a rank waits for another at most: with the overlay it never comes to that, as released it is what is looked at.
WAIT_S = {"with": 60.0, "without": 3.0}
MESSAGES = 150


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Client:
    """vLLM's client on the sender; `fails` names the call that the engine refuses."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.messages: list[dict[str, Any]] = []

    def _call(self, name: str) -> None:
        if name == self.fails:
            raise ConnectionError(f"{name}: the engine is gone")

    def init_weight_transfer_engine(self, _: Any) -> None: ...

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, message: dict[str, Any]) -> None:
        self._call("update")
        self.messages.append(message)

    def finish_weight_update(self, *_: Any) -> None:
        self._call("finish")


def weights(names: str, rank: int) -> list[tuple[Any, Any]]:
    import torch

    return [(n, torch.full((4,), 10.0 * (ord(n) - ord("a") + 1) + rank)) for n in names]


def raising(error: BaseException) -> Any:
    def items(rank: int) -> Any:
        yield from weights("ab", rank)
        raise error

    return items


def killed(rank: int) -> Any:
    yield from weights("ab", rank)
    os.kill(os.getpid(), signal.SIGKILL)


def not_begun(rank: int) -> Any:
    raise OSError("the checkpoint is gone")


def strange_name(rank: int) -> Any:
    return [(b"a", weights("a", rank)[0][1])]


def unpicklable(engine: Any) -> None:
    reduce = engine.reduce_tensor
    engine.reduce_tensor = lambda tensor: (None, (*reduce(tensor)[1][:-1], lambda: None))


def failing_gpu(engine: Any) -> None:
    import torch

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.accelerator.synchronize = synchronize


def failing_collect(engine: Any) -> None:
    import torch

    def collect() -> None:
        raise RuntimeError("CUDA error: out of memory")

    torch.cuda.ipc_collect = collect


#: Name -> the rank that fails, what its log and those of the others say, and options by rank.
SCENARIOS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "exporter": (1, "RuntimeError: exporter broke", {"items": {1: raising(RuntimeError("exporter broke"))}}),
    "exporter interrupted": (1, "KeyboardInterrupt", {"items": {1: raising(KeyboardInterrupt())}}),
    "exporter exits": (1, "SystemExit: 3", {"items": {1: raising(SystemExit(3))}}),
    "error without text": (1, "UnprintableError", {"items": {1: raising(UnprintableError())}}),
    "exporter does not begin": (1, "OSError: the checkpoint is gone", {"items": {1: not_begun}}),
    "name is bytes": (1, "TypeError: Object of type bytes", {"items": {1: strange_name}}),
    "handle cannot be pickled": (1, "pickle", {"break": {1: unpicklable}}),
    "GPU fails": (1, "illegal memory access", {"break": {1: failing_gpu}}),
    "GPU fails on the sender": (0, "illegal memory access", {"break": {0: failing_gpu}}),
    "one GPU": (-1, "ranks 0 and 1 send different layouts from one GPU", {"gpu": {1: 0}, "names": {1: "ba"}}),
    "one rank packs": (-1, "rank 0 sends single tensors, rank 1 packed chunks", {"packed": {1: True}}),
    "engine refuses to start": (0, "ConnectionError: start: the engine is gone", {"fails": "start"}),
    "engine refuses a message": (0, "ConnectionError: update: the engine is gone", {"fails": "update"}),
    "engine refuses to finish": (0, "ConnectionError: finish: the engine is gone", {"fails": "finish"}),
    "packed: exporter": (1, "RuntimeError: exporter broke", {"items": {1: raising(RuntimeError("exporter broke"))}, "packed": {0: True, 1: True}}),
    "packed: after a chunk": (1, "CUDA error: out of memory", {"break": {1: failing_collect}, "packed": {0: True, 1: True}}),
    "packed: one GPU": (-1, "ranks 0 and 1 send different layouts from one GPU", {"gpu": {1: 0}, "names": {1: "ba"}, "packed": {0: True, 1: True}}),
    "killed": (1, "", {"items": {1: killed}}),
}  # fmt: skip


def rank_process(rank: int, folder: Path, options: dict[str, Any], wait: float, outbox: Any) -> None:
    import torch.distributed as dist

    engine: Any = importlib.import_module(probe_ipc.ENGINE)
    gpu = options.get("gpu", {}).get(rank, rank)
    CpuIpc(folder, gpu).install(engine, importlib.import_module(probe_ipc.PACKED))
    packed = options.get("packed", {}).get(rank, False)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=wait))
    items = options.get("items", {}).get(rank) or (lambda rank: weights(options.get("names", {}).get(rank, "ab"), rank))
    source = Source(rank, items)
    # 40 bytes hold two of the vectors.
    info = engine.IPCTrainerInitInfo(rank=rank, packed=packed, packed_buffer_size_bytes=40)
    client = Client(options.get("fails", ""))
    trainer = engine.IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=source.made())
    options.get("break", {}).get(rank, lambda _: None)(engine)
    dist.barrier()
    began = time.monotonic()
    try:
        trainer.send_weights()
        said, kind = "", ""
    except BaseException as error:  # whatever it is, it is what is looked at
        kind = type(error).__name__
        said = probe_ipc._line(error) if kind != "UnprintableError" else kind
        said = "\n".join([said, *getattr(error, "__notes__", ())])
    outbox.put((rank, kind, said, time.monotonic() - began, len(client.messages)))
    outbox.close()
    outbox.join_thread()
    # Not at once: else it would be the end of this process that wakes the other ranks.
    time.sleep(wait if kind else 0.0)
    os._exit(0)


class Source:
    """What a rank exports, made on each pass."""

    def __init__(self, rank: int, items: Any) -> None:
        self.rank, self.items = rank, items

    def made(self) -> Any:
        base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
        described = [base.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in weights("ab", self.rank)]
        members = {
            "__iter__": lambda _: self.items(self.rank),
            "iter_full": lambda _: self.items(self.rank),
            "metadata": functools.cached_property(lambda _: described),
        }
        return type("Source", (base.WeightSource,), members)()


def run(name: str, mode: str) -> list[Any]:
    """(rank, error, text, seconds, messages) of each rank that came to an end."""
    context = multiprocessing.get_context("fork")
    outbox = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (Path(folder), SCENARIOS[name][2], WAIT_S[mode], outbox)
        ranks = [context.Process(target=rank_process, args=(rank, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        wanted = 1 if name == "killed" else 2
        try:
            found = [outbox.get(timeout=WAIT_S[mode] + 30) for _ in range(wanted)]
        except queue.Empty as error:
            raise RuntimeError(f"{name}, {mode} the overlay: no word from a rank") from error
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return sorted(found)


def messages(mode: str) -> dict[str, Any]:
    """Send messages with one thing wrong to a real worker; count what became of them."""
    import torch

    engine: Any = importlib.import_module(probe_ipc.ENGINE)
    counts: collections.Counter[str] = collections.Counter()
    unclear: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        ipc, worker = probe_ipc._worker(engine, Path(folder), 0, False)
        ipc.install(engine, importlib.import_module(probe_ipc.PACKED))
        for seed in range(MESSAGES):
            chance = random.Random(seed)
            wanted, message = made(ipc, engine, chance.choice(["plain", "layouts", "packed", "packed layouts"]))
            hurt(message, chance)
            got: list[tuple[str, Any]] = []
            worker.packed = "tensor_sizes" in message
            worker.model = SimpleNamespace(
                load_weights=lambda weights, got=got: got.extend((n, t.clone()) for n, t in weights)
            )
            try:
                info = worker.parse_update_info(message)
            except Exception:  # as above
                counts["refused by vLLM when it is read"] += 1
                continue
            try:
                worker.receive_weights(info)
            except Exception as error:  # as above
                clear = isinstance(error, ValueError) and "rank " in str(error) and "GPU GPU-0" in str(error)
                counts["clear error" if clear and not got else "other error"] += 1
                unclear += [] if clear else [f"{seed}: {type(error).__name__}: {error}"]
                continue
            right = [n for n, _ in got] == [n for n, _ in wanted] and all(
                torch.equal(t, w) and t.dtype == w.dtype for (_, t), (_, w) in zip(got, wanted, strict=True)
            )
            counts["right" if right else "wrong weights"] += 1
            unclear += [] if right else [f"{seed}: wrong weights"]
    return {"counts": counts, "unclear": unclear}


def made(ipc: CpuIpc, engine: Any, kind: str) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """A good message to the worker on GPU-0, with the tensors in it."""
    import torch

    from ultra_patches.transfer.layout import FORMAT

    wanted = [("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([3, 4])), ("c", torch.full((2, 2), 5.0))]
    names, dtypes = [n for n, _ in wanted], [str(t.dtype).rpartition(".")[2] for _, t in wanted]
    shapes = [list(t.shape) for _, t in wanted]
    fields: dict[str, Any] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    if "packed" in kind:
        whole = torch.cat([t.contiguous().view(-1).view(torch.uint8) for _, t in wanted])
        handles: Any = ipc.reduce(whole)[1]
        fields["tensor_sizes"] = [t.numel() * t.element_size() for _, t in wanted]
        fields["ipc_handles"] = {"GPU-0": handles, "GPU-1": handles}
    else:
        handles = [ipc.reduce(t)[1] for _, t in wanted]
        fields["ipc_handles"] = [{"GPU-0": handle, "GPU-1": handle} for handle in handles]
    if "layouts" in kind:
        entry = {"format": FORMAT, "ranks": {"GPU-0": 0}, "names": names}
        other = {"format": FORMAT, "ranks": {"GPU-1": 1}, "names": names[::-1]}
        each = {
            key: [fields[key], fields[key][::-1]] for key in ("dtype_names", "shapes", "tensor_sizes") if key in fields
        }
        fields = {"names": [entry, other], **each, "ipc_handles": [{"GPU-0": [handles]}, {"GPU-1": [handles]}]}
    return wanted, copy.deepcopy(fields)


JUNK = (
    None,
    -1,
    7,
    10**30,
    0.5,
    float("nan"),
    "",
    "a",
    "float32",
    "float16",
    "manual_seed",
    b"a",
    [],
    [None],
    {},
    {"GPU-0": 3},
    [-2, -2],
    True,
)


def hurt(message: dict[str, Any], chance: random.Random) -> None:
    """Replace, remove, repeat, swap or add one thing at one place of a message, which is nested lists and mappings."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                walk(value[key])

    walk(message)
    owner, key = chance.choice(places)
    if isinstance(owner[key], str) and owner[key] in "abc":
        # A parameter under another's name is a good message of another model, so names only become what is no name.
        owner[key] = chance.choice([None, 7, b"a", ["a"], {}])
        return
    match chance.choice(["junk", "junk", "remove", "repeat", "swap"]):
        case "junk":
            owner[key] = copy.deepcopy(chance.choice(JUNK))
        case "remove":
            del owner[key]
        case "repeat" if isinstance(owner, list):
            owner.insert(key, copy.deepcopy(owner[key]))
        case "swap" if isinstance(owner, list):
            other = chance.randrange(len(owner))
            owner[key], owner[other] = owner[other], owner[key]
        case _:
            owner[key] = copy.deepcopy(owner[chance.choice(list(owner))] if isinstance(owner, dict) else owner[0])


def main() -> None:
    importlib.import_module(probe_ipc.ENGINE)
    wanted = sys.argv[1:] or list(SCENARIOS)
    ultra_patches.require("vllm-ipc-rank-layout")
    result: dict[str, Any] = {"ranks": {}, "messages": {}}
    for mode in ("with", "without"):
        if mode == "without":
            ultra_patches.revert("vllm-ipc-rank-layout")
        result["ranks"][mode] = {name: run(name, mode) for name in wanted if name in SCENARIOS}
        if "messages" in wanted or not sys.argv[1:]:
            result["messages"][mode] = in_child(mode)
    print("\n" + json.dumps(result))


def in_child(mode: str) -> Any:
    """The stand-ins replace functions of torch, so in a process of its own."""
    context = multiprocessing.get_context("fork")
    outbox = context.Queue()
    child = context.Process(target=lambda: outbox.put(messages(mode)))
    child.start()
    found = outbox.get(timeout=120)
    child.join()
    return found


if __name__ == "__main__":
    main()
