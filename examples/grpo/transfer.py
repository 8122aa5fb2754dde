"""How weights leave the trainer: what it exports, the engines that take it, and vLLM's session around both.

vLLM 0.29 and later bring a trainer's side (`WeightTransferTrainerFactory`) for NCCL and CUDA IPC; up to 0.28 there is a static
method for each. Both are called on every trainer rank; rank 0 talks to the engines.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from examples.grpo.config import Sync

Pairs = Iterator[tuple[str, Tensor]]


@dataclass
class Engines:
    """All rollout engines as one; what vLLM calls a weight-sync client."""

    handles: list[Any]
    timeout_s: float

    def _all(self, method: str, *arguments: Any) -> None:
        ray.get([getattr(handle, method).remote(*arguments) for handle in self.handles], timeout=self.timeout_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Set up the worker's side of the transport."""
        self._all("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin a session."""
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Hand over one message of a session."""
        self._all("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        """End the session; the engines compute with the new weights from here on."""
        self._all("finish_weight_update")


@dataclass
class Source:
    """The trainer's weights as vLLM's trainer side wants them: names, dtypes and shapes first, then tensors in that order."""

    export: Callable[[], Pairs]

    def __iter__(self) -> Pairs:
        return self.export()

    def metadata(self) -> list[Any]:
        """(name, dtype, shape) of every tensor; the first call exports once, on all ranks."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        if not hasattr(self, "_metadata"):
            self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.export()]
        return self._metadata


def sender(sync: Sync, engines: Engines, source: Source, rank: int, address: str, workers: int) -> Callable[[], None]:
    """Make what sends all weights once in one session. `workers` is how many GPUs the engines have together."""
    if sync.backend == "shared_file":
        if rank == 0:
            engines.init_weight_transfer_engine({})
        return lambda: _send_files(sync, engines, source, rank)
    from vllm.distributed.weight_transfer import factory, ipc_engine, nccl_engine

    # vLLM 0.26 has a factory, for its sparse transport alone.
    if not hasattr(ipc_engine, "IPCTrainerInitInfo"):
        return _released_before_029(sync, engines, source, rank, address, workers)
    size = sync.buffer_mib << 20
    if sync.backend == "ipc":
        init: Any = ipc_engine.IPCTrainerInitInfo(rank=rank, packed=sync.packed, packed_buffer_size_bytes=size)
    else:
        init = nccl_engine.NCCLTrainerInitInfo(
            rank=rank, master_address=address, master_port=_port(), world_size=workers + 1,
            packed=sync.packed, packed_buffer_size_bytes=size,
        )  # fmt: skip
    made = factory.WeightTransferTrainerFactory.trainer_init(init, client=engines, source=source)
    return made.send_weights


def _send_files(sync: Sync, engines: Engines, source: Source, rank: int) -> None:
    """Chunks of at most buffer_mib in shared memory; the other ranks only take part in the export."""
    from examples.cpu_transfer import pack

    if rank:
        for _ in source:
            pass
        return
    folder = Path(tempfile.mkdtemp(prefix="grpo-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        engines.start_weight_update()
        for number, chunk in enumerate(_chunks(iter(source), sync.buffer_mib << 20)):
            engines.update_weights(pack(folder / str(number), chunk))
        engines.finish_weight_update()
    finally:
        shutil.rmtree(folder)


def _chunks(pairs: Pairs, limit: int) -> Iterator[dict[str, Tensor]]:
    chunk: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if chunk and sum(t.nbytes for t in chunk.values()) + tensor.nbytes > limit:
            yield chunk
            chunk = {}
        chunk[name] = tensor
    yield chunk


def _released_before_029(
    sync: Sync, engines: Engines, source: Source, rank: int, address: str, workers: int
) -> Callable[[], None]:
    size = {"packed": sync.packed, "packed_buffer_size_bytes": sync.buffer_mib << 20}
    if sync.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        if rank == 0:
            engines.init_weight_transfer_engine({})

        def send_handles() -> None:
            if rank == 0:
                engines.start_weight_update()
            torch.distributed.barrier()
            arguments = {"send_mode": lambda info: engines.update_weights(asdict(info)), **size}
            IPCWeightTransferEngine.trainer_send_weights(iter(source), arguments)
            torch.distributed.barrier()
            if rank == 0:
                engines.finish_weight_update()

        return send_handles
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    meta = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in source]
    if rank:
        return lambda: [None for _ in source] and None
    where = {"master_address": address, "master_port": _port(), "world_size": workers + 1}
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(engines.init_weight_transfer_engine, {**where, "rank_offset": 1})
    group = NCCLWeightTransferEngine.trainer_init(where)
    waiting.result()

    def broadcast() -> None:
        names, dtypes, shapes = (list(column) for column in zip(*meta, strict=True))
        engines.start_weight_update()
        # The workers wait inside this call for the broadcast.
        waiting = pool.submit(engines.update_weights, {"names": names, "dtype_names": dtypes, "shapes": shapes, **size})
        NCCLWeightTransferEngine.trainer_send_weights(iter(source), {"group": group, **size})
        waiting.result()
        engines.finish_weight_update()

    return broadcast


def _port() -> int:
    from vllm.utils.network_utils import get_open_port

    return int(get_open_port())
