"""Weight-update sessions on one GPU with CUDA graphs, and the packed NCCL consumer on real streams.

    python tests/gpu/sessions.py     # vllm 0.26, one GPU

A NemotronH with MoE layers takes sessions that are whole, reversed, sent twice, partial, failed and retried; the prompt and the
generated log-probabilities must be those of an engine that was started on the same weights. The graphs are captured at start,
so a tensor that moves would go on being read where it was. Ends with status 1 where it does not go like this.

Seen on an H200 with vllm 0.26.0: 0.000000 in every row; of 1,048,576 values of the first pack none was read too early with the
patch, and all without.
"""

import ultra_patches  # isort: skip

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

os.environ["TINY_NEMOTRON_H_SCALE"] = "8"
os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
# The workers, too, find the transfer backend of the examples.
os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parents[2]}:{os.environ.get('PYTHONPATH', '')}"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from sessions_case import fail, send

from examples import tiny_nemotron_h
from ultra_patches.reload.session import ATOMIC

PATTERN, CONV_KERNEL = "ME*ME-", 4


def engine(checkpoint: Path) -> Any:
    from vllm import LLM

    from examples.cpu_transfer import ENGINE_ARGS

    llm = LLM(
        str(checkpoint), skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=256,
        enable_prefix_caching=False, compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        max_num_seqs=8, **ENGINE_ARGS,
    )  # fmt: skip
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


def score(llm: Any) -> list[float]:
    """Log-probabilities of fixed prompts and of eight tokens that follow each, which the graphs make."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=0, prompt_logprobs=0, detokenize=False)
    found: list[float] = []
    for start in range(4):
        prompt = {"prompt_token_ids": [(start * 7 + j * 13) % 500 + 5 for j in range(32)]}
        output = llm.generate(prompt, sampling, use_tqdm=False)[0]
        for entry in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
            found.append(next(iter(entry.values())).logprob)
    return found


def sessions() -> list[str]:
    """The sessions that did not end as they must."""
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved = [tiny_nemotron_h.save(Path(folder, f"seed-{s}"), s, PATTERN, CONV_KERNEL) for s in (0, 1)]
        old, new = (tiny_nemotron_h.weights(seed, PATTERN, CONV_KERNEL) for seed in (0, 1))
        names = list(new)
        chunks = [names[start : start + 23] for start in range(0, len(names), 23)]
        some = [name for name in names if "q_proj" in name or ".experts.1." in name or name.endswith(".D")]
        llm = engine(saved[0])
        seen["old, fresh"] = score(llm)
        send(llm, folder, new, names[::-1])
        seen["new, reversed"] = score(llm)
        send(llm, folder, old, *chunks)
        seen["old, chunks"] = score(llm)
        send(llm, folder, new, *[chunk * 2 for chunk in chunks])
        seen["new, sent twice"] = score(llm)
        send(llm, folder, old, names)
        print("first call:", fail(llm, folder, new, [])[:90], flush=True)
        seen["old, failed at the first call"] = score(llm)
        print("half-way:", fail(llm, folder, new, chunks[: len(chunks) // 2])[:90], flush=True)
        send(llm, folder, new, *chunks)
        seen["new, failed and retried"] = score(llm)
        send(llm, folder, old, names)
        send(llm, folder, new, some)
        seen["mixed, partial"] = score(llm)
        send(llm, folder, {**old, **{name: new[name] for name in some}}, names)
        seen["mixed, whole"] = score(llm)
        llm.llm_engine.engine_core.shutdown()
        os.environ[ATOMIC] = "1"
        llm = engine(saved[1])
        seen["new, fresh"] = score(llm)
        print("atomic:", fail(llm, folder, old, chunks[:-1])[:90], flush=True)
        seen["new, atomic session failed half-way"] = score(llm)
        send(llm, folder, old, *chunks)
        seen["old, atomic"] = score(llm)
        llm.llm_engine.engine_core.shutdown()
    right = {"old": "old, fresh", "new": "new, fresh", "mixed": "mixed, whole"}
    wrong = []
    for name, values in seen.items():
        wanted = seen[right[name.partition(",")[0]]]
        off = max(abs(a - b) for a, b in zip(values, wanted, strict=True))
        print(f"{name:<40} max|dlogp| {off:.6f}", flush=True)
        if off:
            wrong.append(name)
    if len({tuple(seen[name]) for name in right.values()}) != len(right):
        wrong.append("the checkpoints cannot be told apart")
    return wrong


class Group:
    """A communicator whose broadcast takes its time on the current stream."""

    def __init__(self, packs: Iterable[torch.Tensor]) -> None:
        self._packs = iter(packs)

    def broadcast(self, tensor: torch.Tensor, **_: Any) -> None:
        # The first pack is late, the others are there at once.
        pack, cycles = next(self._packs)
        torch.cuda._sleep(cycles)
        tensor.copy_(pack)


def stale() -> int:
    """Receive two packs; gives how many values of the first were read before they had come."""
    from vllm.distributed.weight_transfer import packed_tensor

    size = 1 << 20
    packs = [torch.full((size,), value, device="cuda").view(torch.uint8) for value in (2.0, 3.0)]
    torch.cuda.synchronize()
    kept: list[torch.Tensor] = []
    read: list[torch.Tensor] = []

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept.extend(tensor for _, tensor in tensors)
        if len(kept) == 2:
            read.append(kept[0].clone())

    meta = iter([("a", ([size], torch.float32)), ("b", ([size], torch.float32))])
    packed_tensor.packed_nccl_broadcast_consumer(
        iterator=meta, group=Group(zip(packs, (1 << 28, 0), strict=True)), src=0, post_unpack_func=load,
        buffer_size_bytes=4 * size - 1, num_buffers=2,
    )  # fmt: skip
    torch.cuda.synchronize()
    return int((read[0] != 2.0).sum())


def main() -> int:
    import vllm.distributed.weight_transfer.packed_tensor  # noqa: F401 # sets the patch

    patched = stale()
    ultra_patches.revert("vllm-nccl-packed-streams")
    plain = stale()
    print(f"values of the first pack read too early: patched {patched}, unpatched {plain}", flush=True)
    wrong = sessions()
    if patched or not plain:
        wrong.append("streams")
    print("FAILED" if wrong else "as expected", wrong, flush=True)
    os._exit(1 if wrong else 0)  # the engines' helper threads do not end by themselves


if __name__ == "__main__":
    main()
