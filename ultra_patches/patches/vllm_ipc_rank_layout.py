"""Rank 0's names and shapes are used for the buffers of all ranks of a CUDA IPC weight transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

from ultra_patches.patch import Finding, Patch, Target, Variant
from ultra_patches.transfer import exchange as rank_transfer

_MODULE = "vllm.distributed.weight_transfer.ipc_engine"


def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def build_receive(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def receive_weights(self: Any, update_info: Any, *load_weights: Any, **named: Any) -> None:
        import torch

        device = getattr(self, "device", None)
        index = torch.accelerator.current_device_index() if device is None else device.index

        def arguments(handle: Any) -> tuple[Any, ...]:
            # A pair (function, arguments) until 0.21.
            return handle[1] if len(handle) == 2 else handle  # type: ignore[no-any-return]

        def load(info: Any) -> None:
            original(self, info, *load_weights, **named)

        rank_transfer.receive(update_info, _uuid(index), load, arguments)

    return receive_weights


def _items(source: Any) -> Any:
    return source.iter_full() if hasattr(source, "iter_full") else iter(source)


def build_send_weights(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def send_weights(self: Any) -> None:
        if not rank_transfer.several_ranks():
            original(self)
            return

        def nothing() -> None: ...

        # The client speaks on the sender alone, while the other ranks wait in the exchange, and after it in the barrier.
        rank_transfer.together(self.client.start_weight_update if self.is_sender else nothing)
        held = self._send(self.source)
        rank_transfer.together(self.client.finish_weight_update if self.is_sender else nothing)
        self._post_send_sync()
        del held

    return send_weights


def build_send_unpacked(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _send_unpacked(self: Any, source: Any) -> Any:
        if not rank_transfer.several_ranks():
            return original(self, source)
        return rank_transfer.send_unpacked(
            lambda: _items(source),
            self.gpu_uuid,
            self.is_sender,
            lambda weight: module.reduce_tensor(weight)[1],
            self._do_send,
        )

    return _send_unpacked


def build_send_packed(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _send_packed(self: Any, source: Any) -> None:
        if not rank_transfer.several_ranks():
            original(self, source)
            return

        def chunks() -> Any:
            return module.packed_ipc_producer(
                iterator=_items(source),
                gpu_uuid=self.gpu_uuid,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self.packed_buffer_size_bytes,
            )

        rank_transfer.send_packed(chunks, self.gpu_uuid, self.is_sender, self._do_send, self._post_send_sync)

    return _send_packed


def build_static_unpacked(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _send_unpacked(iterator: Any, args: Any, gpu_uuid: str) -> None:
        if not rank_transfer.several_ranks():
            original(iterator, args, gpu_uuid)
            return
        engine = module.IPCWeightTransferEngine
        weights = rank_transfer.send_unpacked(
            lambda: iterator,
            gpu_uuid,
            engine._is_rank_zero(),
            lambda weight: module.reduce_tensor(weight)[1],
            lambda **fields: engine._do_send(args=args, **fields),
        )
        engine._post_send_sync()
        del weights

    return _send_unpacked


def build_static_packed(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _send_packed(iterator: Any, args: Any, gpu_uuid: str) -> None:
        if not rank_transfer.several_ranks():
            original(iterator, args, gpu_uuid)
            return
        engine = module.IPCWeightTransferEngine

        def chunks() -> Any:
            return module.packed_ipc_producer(
                iterator=iterator,
                gpu_uuid=gpu_uuid,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=args.packed_buffer_size_bytes,
            )

        rank_transfer.send_packed(
            chunks,
            gpu_uuid,
            engine._is_rank_zero(),
            lambda **fields: engine._do_send(args=args, packed=True, **fields),
            engine._post_send_sync,
        )

    return _send_packed


def build_gathering(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        # 0.17 to 0.21 send each rank's handles by themselves, and some trainers call this on one rank only, so the
        # ranks are gathered only where the trainer says that all of them are here.
        given = dict(trainer_args) if isinstance(trainer_args, dict) else trainer_args
        gather = given.pop("gather", False) if isinstance(given, dict) else False
        if not gather or not rank_transfer.several_ranks():
            original(iterator, given)
            return
        import torch

        def begin() -> tuple[Any, str]:
            return module.IPCTrainerSendWeightsArgs(**given), _uuid(torch.accelerator.current_device_index())

        args, gpu_uuid = rank_transfer.together(begin)
        weights = rank_transfer.send_unpacked(
            lambda: iterator,
            gpu_uuid,
            torch.distributed.get_rank() == 0,
            module.reduce_tensor,
            lambda **fields: _deliver(module, args, fields),
        )
        torch.distributed.barrier()
        torch.cuda.ipc_collect()
        del weights

    return trainer_send_weights


def _deliver(module: ModuleType, args: Any, fields: dict[str, Any]) -> None:
    if args.mode == "ray":
        import ray

        info = asdict(module.IPCWeightTransferUpdateInfo(**fields))
        ray.get(args.llm_handle.update_weights.remote({"update_info": info}))
        return
    # These releases read handles from HTTP only as a pickle; what the overlay adds stays beside it, in JSON.
    handles = module.base64.b64encode(module.pickle.dumps(fields.pop("ipc_handles"))).decode()
    body = {"update_info": {**fields, "ipc_handles_pickled": handles}}
    module.requests.post(f"{args.url}/update_weights", json=body, timeout=300).raise_for_status()


def probe() -> Finding:
    """Two ranks send the same parameters in different orders to two workers."""
    from ultra_patches.transfer.probe import probe as run

    return run()


_RECEIVE = Target(_MODULE, "IPCWeightTransferEngine.receive_weights", build_receive)

PATCH = Patch(
    id="vllm-ipc-rank-layout",
    title="Each worker reads its GPU's buffer with the layout of the rank that packed it",
    upstream="vllm",
    description=(
        "The IPC engine gathers the handles of all trainer ranks but sends only rank 0's names, shapes and sizes. Ranks that "
        "yield another order (expert parallel, bucketing, cached conversion tasks) have their bytes loaded under rank 0's "
        "names; other shapes or chunk sizes give wrong bytes, other counts an IndexError, silence or a hang. 0.17 to 0.21 "
        "gather nothing: there a trainer with several ranks passes `gather=True` among the arguments of "
        "`trainer_send_weights`, on every rank."
    ),
    who="colocated weight transfer (backend `ipc`) from several trainer ranks that do not all yield the same order",
    origin="ultra-patches",
    bug="https://github.com/NovaSky-AI/SkyRL/pull/1816",
    upstream_pr="none for the merged message; per-rank messages can be sent by hand since #52497",
    pr_state="unfixed in 0.33.0",
    removal="vLLM compares or sends the layout of every rank",
    last_checked="2026-11-29",
    variants=(
        Variant(
            "trainer engine, 0.27 on",
            (
                _RECEIVE,
                Target(_MODULE, "IPCTrainerWeightTransferEngine.send_weights", build_send_weights),
                Target(_MODULE, "IPCTrainerWeightTransferEngine._send_unpacked", build_send_unpacked),
                Target(_MODULE, "IPCTrainerWeightTransferEngine._send_packed", build_send_packed),
            ),
        ),
        Variant(
            "static, 0.22 to 0.26",
            (
                _RECEIVE,
                Target(_MODULE, "IPCWeightTransferEngine._send_unpacked", build_static_unpacked),
                Target(_MODULE, "IPCWeightTransferEngine._send_packed", build_static_packed),
            ),
        ),
        Variant(
            "no gather, 0.17 to 0.21",
            (_RECEIVE, Target(_MODULE, "IPCWeightTransferEngine.trainer_send_weights", build_gathering)),
        ),
    ),
    probe=probe,
)
