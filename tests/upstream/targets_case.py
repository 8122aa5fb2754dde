"""Import every module that holds a target, optional ones too, and print which targets are set and what Worker has as JSON."""

import contextlib
import importlib
import json
import sys
from typing import Any

import ultra_patches
from ultra_patches.core import overlay

WORKER = "vllm.v1.worker.gpu_worker"


def main() -> None:
    wanted: dict[str, list[str]] = {}
    for entry in overlay.entries.values():
        if entry.patch.upstream != "vllm":
            continue
        for module in entry.patch.modules:
            with contextlib.suppress(ModuleNotFoundError):  # of another release
                importlib.import_module(module)
    worker: Any = importlib.import_module(WORKER).Worker
    for patch_id, entry in overlay.entries.items():
        if entry.patch.upstream == "vllm" and entry.applied:
            wanted[patch_id] = sorted(entry.applied)
    names = sorted(vars(worker))
    config: Any = importlib.import_module("vllm.config").VllmConfig()
    hashes = {"all": config.compute_hash()}
    for patch_id in wanted:
        ultra_patches.revert(patch_id)
        hashes[patch_id] = config.compute_hash()
    status = {row.id: row.as_dict() for row in ultra_patches.status()}
    files = [sys.modules[WORKER].__file__]
    print("\n" + json.dumps({
        "applied": wanted, "worker": [names, sorted(vars(worker))], "status": status, "files": files,
        "hashes": hashes, "left": [key for entry in overlay.entries.values() for key in entry.applied],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
