"""Train adapters of a real Megatron model on one rank, and print as JSON what is trained, kept, and what the reference is.

python -m tests.grpo.lora_case FOLDER     # FOLDER has the files of the CPU preset
"""

import contextlib
import io
import json
import socket
import sys
from pathlib import Path
from typing import Any


def main(files: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        seen = look(files)
    print(json.dumps(seen))


def look(files: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    from examples.grpo import trainer_state

    policy = make(files)
    generator = torch.Generator().manual_seed(0)
    batch = {"tokens": torch.randint(5, 100, (64, 24), generator=generator), "mask": torch.ones(64, 23)}
    fresh, base = logprobs(policy, batch), exported(policy)
    for _ in range(3):
        norm = policy.update(batch)["grad_norm"]
    trained, weights = logprobs(policy, batch), exported(policy)
    reference = policy.reference_logprobs(batch, 1.0)[1]
    place = files / "checkpoint"
    trainer_state.save(policy, place)
    names = sorted(FileSystemReader(str(place)).read_metadata().state_dict_metadata)
    policy.update(batch)
    moved = logprobs(policy, batch)
    trainer_state.load(policy, place)
    return {
        "says": policy.describe(),
        "grad_norm": norm,
        "adapters at the start change nothing": equal(fresh, reference),
        "training changes the policy": not equal(trained, fresh),
        "changed": sorted(name for name in base if not torch.equal(base[name], weights[name])),
        "names": sorted(base) == sorted(weights),
        "after the reference the adapters are back": equal(logprobs(policy, batch), trained),
        "the step after the checkpoint moved": not equal(moved, trained),
        "in the checkpoint": names,
    }


def make(files: Path) -> Any:
    from examples.grpo.config import load
    from examples.grpo.policy import Policy

    paths = {"model": "model", "data": "train.jsonl", "eval_data": "eval.jsonl", "out": "lora"}
    keys = [f"{key}={files / name}" for key, name in paths.items()]
    one = ["trainer.ranks=1", "trainer.expert_parallel=1"]
    config = load(Path("examples/grpo/cpu_lora.yaml"), [*keys, *one])
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    policy = Policy(config, 0, "127.0.0.1", port)
    policy.schedule(config.grpo.schedule, 10)
    return policy


def logprobs(policy: Any, batch: Any) -> Any:
    return policy.logprobs(batch)[1]


def exported(policy: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in policy.export(cpu=True)}


def equal(left: Any, right: Any) -> bool:
    return bool((left == right).all())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
