"""Questions and answers in GSM8K's format, the tokens of a prompt, and rows of tokens padded to one length."""

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.errors import RunError, first_line
from examples.grpo.config import Config
from examples.grpo.reward import gsm8k_reward


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in `#### 72`."""

    question: str
    answer: str


@dataclass(frozen=True)
class Inputs:
    """What a run reads: the tokenizer, and the problems to train on, to evaluate on and to start from."""

    tokens: Any
    train: list[Problem]
    eval: list[Problem]
    sft: list[Problem]


def inputs(config: Config) -> Inputs:
    """Read them all, so that what is wrong in a file is told before anything starts."""
    train = load(config.data)
    return Inputs(
        tokens=tokenizer(config.model),
        train=train,
        eval=load(config.eval_data) if config.eval_data else train,
        sft=load(config.sft.data) if config.sft else [],
    )


def load(path: Path) -> list[Problem]:
    """Read JSON lines with `question` and `answer`; RunError names the line that is not one."""
    found = []
    # As bytes: a text's `splitlines` ends a line at U+2028 too, which JSON may hold.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            problem = Problem(row["question"], row["answer"])
            gsm8k_reward("", problem.answer)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{path}, line {number}: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(problem.question, str):
            raise RunError(f"{path}, line {number}: the question is no text")
        found.append(problem)
    if not found:
        raise RunError(f"{path}: no lines")
    return found


def tokenizer(model: Path) -> Any:
    """The tokenizer of a checkpoint, with its chat template."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(model)
    if not found.chat_template:
        raise RunError(
            f"{model}: the tokenizer has no chat template: put the model's chat_template.jinja into the folder"
        )
    if found.eos_token_id is None:
        raise RunError(f"{model}: the tokenizer has no end-of-sequence token: set eos_token in tokenizer_config.json")
    return found


def prompt(tokens: Any, problem: Problem) -> list[int]:
    """The tokens of a question, up to where the assistant begins."""
    message = [{"role": "user", "content": problem.question}]
    return list(tokens.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def draw(problems: Sequence[Problem], count: int, step: int, seed: int) -> list[Problem]:
    """The problems of a step: shuffled anew each epoch, and the same for the same seed wherever a run begins."""
    found = []
    for index in range(step * count, (step + 1) * count):
        epoch, place = divmod(index, len(problems))
        found.append(problems[_order(len(problems), epoch, seed)[place]])
    return found


@functools.lru_cache(maxsize=4)
def _order(count: int, epoch: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


def pad(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], multiple: int, rows: int
) -> dict[str, Tensor]:
    """`tokens` int64 [n, s] and `mask` fp32 [n, s - 1] that is 1 where the next token is of the response.

    s is the longest row rounded up to `multiple`, n the number of rows rounded up to `rows`; rows that fill up have no mask.
    """
    length = max(len(head) + len(tail) for head, tail in zip(prompts, responses, strict=True))
    length = -(-length // multiple) * multiple
    count = -(-len(prompts) // rows) * rows
    tokens, mask = torch.zeros(count, length, dtype=torch.int64), torch.zeros(count, length - 1)
    for row, (head, tail) in enumerate(zip(prompts, responses, strict=True)):
        end = len(head) + len(tail)
        tokens[row, :end] = torch.tensor([*head, *tail])
        mask[row, len(head) - 1 : end - 1] = 1
    return {"tokens": tokens, "mask": mask}
