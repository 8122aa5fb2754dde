"""One real vLLM engine on the CPU takes new weights and gives them back, checked to the last bit.

Two random NemotronH checkpoints are written, of seed 0 and seed 1. An engine starts on the first, is brought
to the second by one weight-update session of several chunks, and back by another. The log-probabilities of
fixed prompts must be exactly those of the first start again. That alone would miss a tensor which no session
reaches: --fresh compares the ones in between with an engine that was started on the second checkpoint.
"""

import ultra_patches  # noqa: F401 - armed before anything imports vLLM

# isort: split
import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from examples import tiny_nemotron_h

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM

Logprobs = list[list[float]]
"""One list a prompt; entry i is the log-probability of its token i + 1 given the tokens before."""

# The last one is longer than two of the model's Mamba chunks.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (3, 5, 7, 9, 11, 13),
    (500, 400, 300, 200, 100),
    tuple(range(40, 80)),
)
# Not a divisor of a layer's tensor count: chunks end in the middle of Mamba2 layers.
TENSORS_PER_CHUNK = 7
MAMBA_PARAMETERS = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


@dataclass
class Result:
    """What one run saw; `differences` has max |dlogp| of "after-before", "back-before", "fresh-after"."""

    before: Logprobs
    after: Logprobs
    back: Logprobs
    fresh: Logprobs | None = None
    sensitivity: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    def failure(self) -> str | None:
        """The first check that failed, in one line; None if none did."""
        changed = self.differences["after-before"]
        if not 0 < changed < math.inf:
            return f"FAILED: after the session max |dlogp| to before is {changed}, expected a finite change"
        for name in ("back-before", "fresh-after"):
            if (found := self.differences.get(name, 0)) != 0:
                return f"FAILED: {name.replace('-', ' and ')} differ by max |dlogp| {found:.6g}, expected 0"
        if unseen := [name for name, found in self.sensitivity.items() if found == 0]:
            return f"FAILED: log-probabilities do not depend on whether a session sends {', '.join(unseen)}"
        return None


def say(message: str) -> None:
    """Progress goes to stderr, so that stdout is JSON alone where it is asked for."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def engine(checkpoint: Path) -> Iterator["LLM"]:
    """An engine that serves the checkpoint; its processes have ended when the block is left."""
    say(f"starting an engine on {checkpoint.name} ...")
    began = time.monotonic()
    from examples.cpu_transfer import ENGINE_ARGS

    llm = _start(checkpoint, ENGINE_ARGS)
    say(f"started in {time.monotonic() - began:.1f} s")
    try:
        llm.init_weight_transfer_engine({"init_info": {}})
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _start(checkpoint: Path, extra: Mapping[str, Any]) -> "LLM":
    from vllm import LLM

    return LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        # Cached prefixes would be those of the weights before a session.
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        **extra,
    )


def score(llm: "LLM") -> Logprobs:
    """The log-probability of each prompt token but the first."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    scores: Logprobs = []
    for prompt in PROMPTS:
        # One prompt a call: several would be batched by arrival time, and a batch's size changes rounding.
        output = llm.generate({"prompt_token_ids": list(prompt)}, parameters, use_tqdm=False)[0]
        entries = output.prompt_logprobs or []
        pairs = zip(prompt[1:], entries[1:], strict=True)
        scores.append([entry[token].logprob for token, entry in pairs if entry is not None])
    return scores


def update(llm: "LLM", tensors: Mapping[str, "Tensor"]) -> int:
    """Send all tensors in one weight-update session, TENSORS_PER_CHUNK at a time; returns the chunk count."""
    from examples.cpu_transfer import pack

    names = list(tensors)
    chunks = [names[start : start + TENSORS_PER_CHUNK] for start in range(0, len(names), TENSORS_PER_CHUNK)]
    with TemporaryDirectory() as folder:
        llm.start_weight_update()
        for index, chunk in enumerate(chunks):
            info = pack(Path(folder, f"chunk-{index}"), {name: tensors[name] for name in chunk})
            llm.update_weights({"update_info": info})
        llm.finish_weight_update()
    return len(chunks)


def max_difference(left: Logprobs, right: Logprobs) -> float:
    """Max |left - right| over all tokens; infinite where a value is not finite."""
    pairs = [pair for rows in zip(left, right, strict=True) for pair in zip(*rows, strict=True)]
    return max(abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs)


def sensitivity(
    llm: "LLM", after: Logprobs, old: Mapping[str, "Tensor"], new: Mapping[str, "Tensor"]
) -> dict[str, float]:
    """By parameter: max |dlogp| to `after` of a session to `new` in which that Mamba2 parameter stays `old`.

    Zero means that nothing compared here would notice that the parameter was never updated.
    """
    found = {}
    for parameter in MAMBA_PARAMETERS:
        kept = {name: tensor for name, tensor in old.items() if name.endswith(f".mixer.{parameter}")}
        update(llm, {**new, **kept})
        found[parameter] = max_difference(after, score(llm))
    return found


def show(title: str, scores: Logprobs) -> None:
    """A table: a row a prompt, a column a token."""
    columns = 5
    lines = [f"{title:<28}" + "".join(f"{f'token {i + 1}':>10}" for i in range(columns))]
    for prompt, row in zip(PROMPTS, scores, strict=True):
        label = " ".join(map(str, prompt[:5])) + (" ..." if len(prompt) > 5 else "")
        more = f"  and {len(row) - columns} more" if len(row) > columns else ""
        lines.append(f"  {label:<26}" + "".join(f"{value:10.5f}" for value in row[:columns]) + more)
    say("\n".join(lines))


def run(folder: Path, conv_kernel: int, fresh: bool, check_sensitivity: bool) -> Result:
    """Save the checkpoints into the folder, run the sessions, and show and return all log-probabilities."""
    pattern = tiny_nemotron_h.DEFAULT_PATTERN
    saved = [tiny_nemotron_h.save(folder / f"seed-{seed}", seed, pattern, conv_kernel) for seed in (0, 1)]
    old, new = (tiny_nemotron_h.weights(seed, pattern, conv_kernel) for seed in (0, 1))
    with engine(saved[0]) as llm:
        before = score(llm)
        show("before, seed 0", before)
        began = time.monotonic()
        chunks = update(llm, new)
        say(f"session to seed 1: {len(new)} tensors in {chunks} chunks, {time.monotonic() - began:.2f} s")
        after = score(llm)
        show("after, seed 1", after)
        found = sensitivity(llm, after, old, new) if check_sensitivity else {}
        update(llm, old)
        back = score(llm)
        show("session back, seed 0", back)
    result = Result(before, after, back, sensitivity=found)
    result.differences |= {
        "after-before": max_difference(after, before),
        "back-before": max_difference(back, before),
    }
    if fresh:
        with engine(saved[1]) as llm:
            result.fresh = score(llm)
        show("fresh engine, seed 1", result.fresh)
        result.differences["fresh-after"] = max_difference(result.fresh, after)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if every value is as it must be, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="compare with an engine started on seed 1")
    parser.add_argument("--sensitivity", action="store_true", help="check that each Mamba2 parameter counts")
    parser.add_argument("--json", action="store_true", help="print all values as one line of JSON on stdout")
    parser.add_argument(
        "--conv-kernel",
        type=int,
        default=tiny_nemotron_h.DEFAULT_CONV_KERNEL,
        help="width of the Mamba2 convolution; 4, as in the real models, fails on CPUs where vLLM packs it",
    )
    options = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with TemporaryDirectory() as folder:
        # vLLM leaves its sockets behind; here they go with the folder.
        os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)
        result = run(Path(folder), options.conv_kernel, options.fresh, options.sensitivity)
    if options.json:
        print(json.dumps(asdict(result)), flush=True)
    for title, values in (("one Mamba2 parameter left old", result.sensitivity), ("all", result.differences)):
        if values:
            listed = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
            say(f"max |dlogp|, {title}: {listed}")
    if failure := result.failure():
        say(failure)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
