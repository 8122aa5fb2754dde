"""One vLLM engine, for a Ray actor: it generates, scores, and takes new weights in vLLM's own session."""

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import ultra_patches
from examples.cpu_transfer import BACKEND  # noqa: F401 # every worker imports this module, and so registers the CPU backend
from examples.grpo.config import Config

Tokens = list[int]


class WorkerExtension:
    """What vLLM adds to each of its workers. Names begin with grpo_, so that none of vLLM's is covered."""

    def grpo_require(self, patches: Sequence[str]) -> None:
        """Raise unless these patches are in force, or not needed, in this worker."""
        for patch in patches:
            ultra_patches.require(patch)

    def grpo_fingerprints(self) -> dict[str, str]:
        """The hash of each parameter and buffer of this worker's model, in the layout its kernels read."""
        import torch

        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {
            name: hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
            for name, tensor in tensors
            if tensor.numel()
        }


class Rollout:
    """A vLLM engine on a checkpoint. Log-probabilities are in nats, of the sampling distribution where sampled."""

    def __init__(self, config: Config, model: Path, environment: dict[str, str]) -> None:
        os.environ |= environment
        from vllm import LLM

        wanted = config.rollout
        where: dict[str, Any] = {}
        if config.device == "cuda":
            where = {"tensor_parallel_size": wanted.tensor_parallel, "pipeline_parallel_size": wanted.pipeline_parallel}
            where["distributed_executor_backend"] = "ray"
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype=config.dtype,
            seed=config.seed,
            enable_prefix_caching=wanted.prefix_caching,
            logprobs_mode="processed_logprobs",
            weight_transfer_config={"backend": config.sync.backend},
            worker_extension_cls=f"{__name__}.WorkerExtension",
            **{**where, **wanted.engine},
        )
        threading.Thread(target=_end_with, args=(multiprocessing.active_children(),), daemon=True).start()

    def require(self, patches: Sequence[str]) -> None:
        """Raise unless every worker has these patches, or does not need them."""
        self.llm.collective_rpc("grpo_require", args=(list(patches),))

    def generate(
        self, prompts: list[Tokens], group: int, length: int, temperature: float, seed: int, stop: int
    ) -> list[list[tuple[Tokens, list[float]]]]:
        """For each prompt `group` responses of at most `length` tokens, with the log-probability of each token."""
        from vllm import SamplingParams

        # A seed a prompt: the same prompt in two steps must not give the same responses.
        sampling = [
            SamplingParams(
                n=group, temperature=temperature, max_tokens=length, logprobs=0, seed=seed + index, detokenize=False,
                stop_token_ids=[stop],
            )
            for index in range(len(prompts))
        ]  # fmt: skip
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [
            [
                (
                    list(one.token_ids),
                    [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)],
                )
                for one in output.outputs
            ]
            for output in outputs
        ]

    def score(self, sequences: list[Tokens]) -> list[list[float]]:
        """The log-probability of each token but the first, at temperature 1."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in sequences], sampling, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
            for row, output in zip(sequences, outputs, strict=True)
        ]

    def fingerprints(self) -> list[dict[str, str]]:
        """`grpo_fingerprints` of every worker."""
        return self.llm.collective_rpc("grpo_fingerprints")

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """vLLM's."""
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        """vLLM's."""
        self.llm.start_weight_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        """vLLM's."""
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        """vLLM's, and then the prefix cache is emptied: its keys and values are those of the old weights."""
        self.llm.finish_weight_update()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running during a weight update")


def _end_with(children: list[Any]) -> None:
    """End this process when a child of it does: vLLM waits for an answer of an EngineCore that was killed (seen in 0.32.0)."""
    if children:
        connection.wait([child.sentinel for child in children])
        os._exit(1)
