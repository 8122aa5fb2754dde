"""Two trainer ranks and a vLLM engine (tensor parallel 2) on the same two GPUs, weights over real CUDA IPC.

    torchrun --nproc-per-node 2 tests/gpu/ipc_roundtrip.py     # vllm 0.22 to 0.26, two GPUs

Each layout is sent unpacked and packed, and the prompt log-probabilities are compared with those before the transfer:
`same`, where both ranks yield one order, and `rotated`, where rank 1 yields its half of the experts first. Then the patch is
reverted on the trainer's ranks, and `rotated` must show the damage. Ends with status 1 where it does not go like this.

Seen on two H200s with vllm 0.26.0: 0.00000 in the four patched rows, 0.447 for `rotated` after the revert.
"""

import ultra_patches  # isort: skip

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ["TINY_NEMOTRON_H_SCALE"] = "8"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import tiny_nemotron_h

PATCH = "vllm-ipc-rank-layout"
PATTERN, CONV_KERNEL, EXPERTS = "ME*ME-", 4, tiny_nemotron_h.EXPERTS
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def engine(checkpoint: str) -> Any:
    """Start the engine with the launcher's variables out of its sight: it makes process groups of its own."""
    hidden = [n for n in os.environ if n in LAUNCHER or n.startswith(("TORCHELASTIC", "ROLE_", "GROUP_WORLD"))]
    kept = {name: os.environ.pop(name) for name in hidden}
    from vllm import LLM

    llm = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.3,
        max_model_len=512,
        tensor_parallel_size=2,
        weight_transfer_config={"backend": "ipc"},
        enable_prefix_caching=False,
    )
    os.environ |= kept
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


def logprobs(llm: Any, vocabulary: int) -> torch.Tensor:
    """Log-probabilities of fixed prompts, fp32 [prompts, tokens - 1]."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(i * 7 + j * 13) % (vocabulary - 9) + 5 for j in range(64)]} for i in range(8)]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return torch.tensor([[next(iter(p.values())).logprob for p in o.prompt_logprobs[1:]] for o in outputs])


def rotated(names: list[str]) -> list[str]:
    """The second half of each layer's experts first, as an expert-parallel rank does that starts with its own."""

    def place(name: str) -> str:
        head, marker, tail = name.partition(".experts.")
        if not marker:
            return name
        expert, _, rest = tail.partition(".")
        return f"{head}{marker}{(int(expert) + EXPERTS // 2) % EXPERTS}.{rest}"

    return [place(name) for name in names]


def send(llm: Any, items: Any, packed: bool) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    if llm is not None:
        llm.start_weight_update()
    dist.barrier()
    options = {
        "send_mode": lambda info: llm.update_weights({"update_info": asdict(info)}),
        "packed": packed,
        "packed_buffer_size_bytes": 1 << 24,
    }
    IPCWeightTransferEngine.trainer_send_weights(items, options)
    dist.barrier()
    if llm is not None:
        llm.finish_weight_update()


def main() -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.cuda.set_device(rank)
    cpu_weights = tiny_nemotron_h.weights(0, PATTERN, CONV_KERNEL)
    vocabulary = cpu_weights["lm_head.weight"].shape[0]
    llm = before = None
    if rank == 0:
        llm = engine(str(tiny_nemotron_h.save(tempfile.mkdtemp(), 0, PATTERN, CONV_KERNEL)))
        before = logprobs(llm, vocabulary)
    dist.barrier()
    import vllm.distributed.weight_transfer.ipc_engine  # noqa: F401 # sets the patch, so that it can be required

    ultra_patches.require(PATCH)
    weights = {name: tensor.cuda() for name, tensor in cpu_weights.items()}
    bad = []
    for patched in (True, False):
        if not patched:
            ultra_patches.revert(PATCH)
        for layout in ("same", "rotated"):
            names = rotated(list(weights)) if layout == "rotated" and rank == 1 else list(weights)
            for packed in (False, True):
                send(llm, ((name, weights[name]) for name in names), packed)
                if llm is None or before is None:
                    continue
                off = float((logprobs(llm, vocabulary) - before).abs().mean())
                print(
                    f"patched={patched!s:<5} layout={layout:<7} packed={packed!s:<5} mean|dlogp|={off:.5f}", flush=True
                )
                if (off != 0) is (patched or layout == "same"):
                    bad.append((patched, layout, packed, off))
    dist.barrier()
    if llm is not None:
        llm.llm_engine.engine_core.shutdown()
        print("FAILED" if bad else "as expected", bad, flush=True)
    os._exit(1 if bad else 0)  # the engine's helper threads do not end by themselves


if __name__ == "__main__":
    main()
