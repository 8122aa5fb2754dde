"""Run one weight transfer on the installed vLLM: real trainer engines in two or more gloo ranks, real worker engines.

Trainer ranks are forked processes, the workers live in this one. Only CUDA IPC is stood in for, by files
that both sides map (`ultra_patches/stand_ins/ipc.py`).
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import multiprocessing
import os
import queue
import tempfile
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ultra_patches.patch import Finding, Verdict
from ultra_patches.stand_ins.ipc import CpuIpc

ENGINE = "vllm.distributed.weight_transfer.ipc_engine"
PACKED = "vllm.distributed.weight_transfer.packed_tensor"


@dataclass
class Outcome:
    """`received[gpu]` lists (name, tensor) in order; `errors[gpu]` and `trainers[rank]` hold the first line of an error."""

    received: list[list[tuple[str, Any]]]
    errors: list[str | None]
    trainers: list[str | None]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def wrong(self, sent: list[list[tuple[str, Any]]]) -> list[str]:
        """What each worker holds that its own rank did not send, and what it lacks."""
        import torch

        found = []
        for gpu, (got, wanted) in enumerate(zip(self.received, sent, strict=True)):
            want = dict(wanted)
            for name, tensor in got:
                given = want.pop(name, None)
                if given is None or tensor.shape != given.shape or not torch.equal(tensor, given):
                    found.append(f"GPU {gpu}: {name}")
            found += [f"GPU {gpu}: no {name}" for name in want]
        return found


def transfer(
    sent: list[list[tuple[str, Any]]], *, packed: bool, buffer_bytes: int = 1 << 20, seconds: float = 30.0
) -> Outcome:
    """Each rank sends its own (name, tensor) list; worker N runs on the GPU of rank N.

    `seconds` bounds the process group, so that ranks that wait for each other end in an error.
    """
    engine: Any = importlib.import_module(ENGINE)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    context = multiprocessing.get_context("fork")
    outbox, replies = context.Queue(), context.Queue()
    result = Outcome([[] for _ in sent], [None] * len(sent), [None] * len(sent))
    with tempfile.TemporaryDirectory() as folder:
        options = (Path(folder), len(sent), packed, buffer_bytes, seconds, outbox, replies)
        ranks = [context.Process(target=_trainer, args=(rank, items, *options)) for rank, items in enumerate(sent)]
        for process in ranks:
            process.start()
        running = set(range(len(sent)))
        workers = [_worker(engine, Path(folder), gpu, packed) for gpu in range(len(sent))]
        while running:
            try:
                kind, value = outbox.get(timeout=seconds + 30)
            except queue.Empty:
                for rank in running:
                    result.trainers[rank] = "hangs"
                break
            if kind == "message":
                result.messages.append(value)
                replies.put(_deliver(engine, workers, value, result))
            else:
                rank, error = value
                result.trainers[rank] = error
                running.discard(rank)
        for process in ranks:
            process.join(5)
            process.kill()
    return result


def _worker(engine: Any, folder: Path, gpu: int, packed: bool) -> tuple[CpuIpc, Any]:
    import torch

    worker = object.__new__(engine.IPCWeightTransferEngine)
    worker.packed, worker.parallel_config = packed, None
    worker.device = torch.device("cuda", gpu)
    module: Any = importlib.import_module(PACKED)
    if hasattr(module, "PackedBufferImporter"):
        worker._packed_importer = module.PackedBufferImporter()
    return CpuIpc(folder, gpu), worker


def _deliver(engine: Any, workers: list[tuple[CpuIpc, Any]], update: dict[str, Any], result: Outcome) -> str | None:
    """Hand one message to every worker, as `collective_rpc` does; the first error is the answer."""
    answer = None
    for gpu, (ipc, worker) in enumerate(workers):
        ipc.install(engine, importlib.import_module(PACKED))
        got = result.received[gpu]

        def load_weights(weights: Any, got: list[tuple[str, Any]] = got) -> None:
            got.extend((name, tensor.clone()) for name, tensor in weights)

        worker.model = SimpleNamespace(load_weights=load_weights)
        takes_loader = "load_weights" in _parameters(engine)
        try:
            info = worker.parse_update_info(dict(update))
            worker.receive_weights(info, load_weights) if takes_loader else worker.receive_weights(info)
        except Exception as error:  # noqa: BLE001 # whatever a worker raises is the answer of the engine
            text = _line(error)
            result.errors[gpu] = result.errors[gpu] or text
            answer = answer or text
    return answer


def _parameters(engine: Any) -> tuple[str, ...]:
    function = engine.IPCWeightTransferEngine.receive_weights
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return tuple(function.__code__.co_varnames[: function.__code__.co_argcount])


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _trainer(
    rank: int,
    items: list[tuple[str, Any]],
    folder: Path,
    world: int,
    packed: bool,
    buffer_bytes: int,
    seconds: float,
    outbox: Any,
    replies: Any,
) -> None:
    import torch.distributed as dist

    engine: Any = importlib.import_module(ENGINE)
    CpuIpc(folder, rank).install(engine, importlib.import_module(PACKED))
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=seconds)
    )

    def send(update: Any) -> None:
        outbox.put(("message", asdict(update) if is_dataclass(update) and not isinstance(update, type) else update))
        error = replies.get(timeout=seconds)
        if error:
            raise RuntimeError(f"the engine answers {error}")

    try:
        _send(engine, rank, items, packed, buffer_bytes, send)
        outbox.put(("done", (rank, None)))
    except BaseException as error:  # noqa: BLE001 # reported to the parent, which judges
        outbox.put(("done", (rank, _line(error))))
    outbox.close()
    outbox.join_thread()
    os._exit(0)


def _send(engine: Any, rank: int, items: list[tuple[str, Any]], packed: bool, buffer_bytes: int, send: Any) -> None:
    """The public call of each family of the engine."""
    if hasattr(engine, "IPCTrainerWeightTransferEngine"):
        info = engine.IPCTrainerInitInfo(rank=rank, packed=packed, packed_buffer_size_bytes=buffer_bytes)
        trainer = engine.IPCTrainerWeightTransferEngine.trainer_init(info, client=_Client(send), source=_source(items))
        trainer.send_weights()
        return
    static = engine.IPCWeightTransferEngine
    fields = engine.IPCTrainerSendWeightsArgs.__dataclass_fields__
    if "send_mode" in fields:
        static.trainer_send_weights(
            iter(items),
            engine.IPCTrainerSendWeightsArgs(send_mode=send, packed=packed, packed_buffer_size_bytes=buffer_bytes),
        )
        return
    if packed:
        raise NotImplementedError("this release has no packed transfer")

    def post(url: str, json: Any, timeout: float) -> Any:  # noqa: ARG001 # the signature of requests.post
        send(_through_json(json)["update_info"])
        return SimpleNamespace(raise_for_status=lambda: None)

    engine.requests = SimpleNamespace(post=post)
    gathers = getattr(static.trainer_send_weights, "_self_ultra_patch", None)
    static.trainer_send_weights(iter(items), {"mode": "http", "url": "", **({"gather": True} if gathers else {})})


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


class _Client:
    """vLLM's weight-sync client (`vllm/distributed/weight_transfer/clients.py`, 0.27 on)."""

    def __init__(self, send: Any) -> None:
        self.update_weights = send

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self, *_: Any) -> None: ...


def _source(items: list[tuple[str, Any]]) -> Any:
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    described = [base.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items]
    members: dict[str, Any] = {"__iter__": lambda _: iter(items), "iter_full": lambda _: iter(items)}
    if hasattr(base.WeightSource, "iter_full"):
        members["metadata"] = functools.cached_property(lambda _: described)
    else:
        members["metadata"] = lambda _: described
    source = type("Source", (base.WeightSource,), members)
    return source()


def probe() -> Finding:
    """Two ranks with two parameters of one shape, the second rank in the other order, packed where the release can."""
    import torch

    def weights(rank: int) -> list[tuple[str, Any]]:
        named = [("a", torch.full((4,), 10.0 + rank)), ("b", torch.full((4,), 20.0 + rank))]
        return named if rank == 0 else named[::-1]

    sent = [weights(0), weights(1)]
    outcomes = [transfer(sent, packed=packed) for packed in (False, True) if _can(packed)]
    for packed, outcome in enumerate(outcomes):
        wrong = outcome.wrong(sent)
        said = next((e for e in [*outcome.errors, *outcome.trainers] if e), None)
        if wrong or said:
            what = f"wrong {', '.join(wrong)}, " if wrong else ""
            mode = "packed" if packed else "unpacked"
            return Finding(Verdict.DEFECT, f"{mode}, ranks in two orders: {what}{(said or 'no error')[:90]}")
    return Finding(Verdict.CLEAN, "two ranks in two orders arrive right, unpacked and packed")


def _can(packed: bool) -> bool:
    return not packed or hasattr(importlib.import_module(PACKED), "packed_ipc_producer")
