"""What a user's own code looks like to a type checker. Checked by test_typed_api.py, never run.

An `ignore` that is no longer needed is an error under --strict: each marks a misuse that must not pass.
"""

from collections.abc import Iterator
from typing import Any, assert_type

import torch

import ultra_patches
from ultra_patches import PatchStatus, UltraPatchesError, UltraPatchesWarning, received
from ultra_patches.entrypoints.ray import runtime_env


def start() -> dict[str, Any]:
    rows = ultra_patches.status()
    assert_type(rows, list[PatchStatus])
    for row in rows:
        assert_type(row.id, str)
        assert_type(row.version, str | None)
        assert_type(row.state.value, str)
        assert_type(row.targets, tuple[str, ...])
        assert_type(row.rebound, int)
        assert_type(row.as_dict(), dict[str, object])
    try:
        ultra_patches.require("vllm-ipc-rank-layout")
    except UltraPatchesError as error:
        raise SystemExit(str(error)) from error
    ultra_patches.revert("vllm-ipc-rank-layout")
    assert_type(ultra_patches.__version__, str)
    assert_type(runtime_env({"env_vars": {"NCCL_DEBUG": "WARN"}}, secrets=["HF_TOKEN"]), dict[str, Any])
    return runtime_env()


def export(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    ultra_patches.check_router_biases(weights)
    ultra_patches.check_router_biases(iter(weights), required=True)
    for name, tensor in weights.items():
        dtype = ultra_patches.sync_dtype(name, tensor, torch.bfloat16)
        assert_type(dtype, torch.dtype)
        yield name, tensor.to(dtype)


def receive(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with received.own_copies():
        model.load_state_dict(weights)
    assert_type(received.are_own_copies(), bool)


def warned() -> type[Warning]:
    return UltraPatchesWarning


def misuse(tensor: torch.Tensor, row: PatchStatus) -> None:
    ultra_patches.require(["vllm-ipc-rank-layout"])  # type: ignore[arg-type]
    ultra_patches.revert()  # type: ignore[call-arg]
    ultra_patches.sync_dtype(tensor, "name", torch.bfloat16)  # type: ignore[arg-type]
    ultra_patches.check_router_biases(["a"], True)  # type: ignore[call-arg]
    row.state = "applied"  # type: ignore[assignment, misc]
