"""A converted LoRA adapter in vLLM on a GPU: its log-probabilities, those of the base and those of the merged model.

    python tests/gpu/serve_adapter.py BASE ADAPTER MERGED

Prints mean |dlogp| in nats over the tokens of some prompts; exit status 1 where the adapter is not the merged model, or changes
nothing. MERGED may be the checkpoint that a run of examples.grpo exports.
"""

import gc
import random
import sys
from pathlib import Path
from statistics import mean
from typing import Any

#: Of what the adapter changes: in bf16 the merged weights are rounded once more, which random tokens show.
TOLERANCE = 0.1


def prompts(vocabulary: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(8, vocabulary) for _ in range(32)] for _ in range(16)]


def logprobs(model: Path, adapter: Path | None = None) -> dict[str, list[float]]:
    """Of every token but the first, by who is asked: `base`, and `adapter` where there is one."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16} if adapter else {}
    engine = LLM(
        str(model),
        max_model_len=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        **options,
    )
    rows = prompts(engine.llm_engine.model_config.get_vocab_size())
    asked = {"base": None} | ({"adapter": LoRARequest("tuned", 1, str(adapter))} if adapter else {})
    sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for name, request in asked.items():
        outputs = engine.generate(
            [{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False, lora_request=request
        )
        found[name] = [
            entry[token].logprob
            for row, output in zip(rows, outputs, strict=True)
            for token, entry in zip(row[1:], output.prompt_logprobs[1:], strict=True)
        ]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> int:
    base, adapter, merged = map(Path, sys.argv[1:])
    served, plain = logprobs(base, adapter), logprobs(merged)["base"]
    wrong = mean(abs(a - b) for a, b in zip(served["adapter"], plain, strict=True))
    moved = mean(abs(a - b) for a, b in zip(served["adapter"], served["base"], strict=True))
    print(f"mean |dlogp|: adapter - merged {wrong:.5f}, adapter - base {moved:.5f}")
    return 0 if wrong < TOLERANCE * moved else 1


if __name__ == "__main__":
    raise SystemExit(main())
