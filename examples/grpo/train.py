"""GRPO with Megatron-Core, Megatron-Bridge and vLLM under Ray, with the weights going through the patched path.

    python -m examples.grpo.train examples/grpo/cpu.yaml [key=value ...] [--unsafe]

A run whose `out` has a checkpoint goes on from it. Without the patches that the weights depend on it refuses to start;
--unsafe starts it all the same, and shows the damage instead of stopping at it.
"""

import ultra_patches  # noqa: F401 # armed before anything imports vLLM or Megatron

# isort: split
import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import ray
import torch
from torch import Tensor

from examples.errors import RunError
from examples.grpo import checkpoint, cluster, data, diagnose, grpo, report
from examples.grpo.config import Config, load
from examples.grpo.reward import gsm8k_reward

Metrics = dict[str, float]


class NotLoadedError(RunError):
    """A checkpoint of the run could not be loaded."""

    def __init__(self, step: int, error: Exception) -> None:
        super().__init__(f"{error}")
        self.step = step


class Run:
    """The state of a run: what was configured, its actors, and where it reports."""

    def __init__(
        self, config: Config, inputs: data.Inputs, actors: cluster.Cluster, progress: report.Report, *, unsafe: bool
    ) -> None:
        self.config, self.inputs, self.tokens = config, inputs, inputs.tokens
        self.cluster, self.report, self.unsafe = actors, progress, unsafe
        self.recent: list[float] = []

    def run(self) -> None:
        """Supervised steps, or a checkpoint; then GRPO."""
        if self.config.peft.enabled:
            self.report.say(self.cluster.train("describe")[0])
        steps = checkpoint.saved(self.config.out)
        begin = steps[-1] if steps else 0
        if steps:
            self.schedule()
            self.load(begin)
            self.report.say(f"resumed after GRPO step {begin}")
        else:
            self.supervise()
            self.schedule()
        if self.config.grpo.kl and not self.config.peft.enabled:
            self.reference(new=not steps)
        if not steps:
            self.save(0)
        self.sync()
        for step in range(begin, self.config.grpo.steps):
            self.step(step)
            self.save(step + 1)
            if self.done():
                self.report.say(f"mean reward {mean(self.recent):.3f} of the last 5 steps: done")
                break
        if self.config.export is not None:
            self.cluster.train("save_pretrained", self.config.export)
            self.report.say(f"trained model: {self.config.export}")

    def load(self, step: int) -> None:
        """Go on from the checkpoint after so many GRPO steps; NotLoadedError where it cannot be."""
        try:
            self.cluster.on_trainers("load", checkpoint.folder(self.config.out, step))
        except (RunError, ray.exceptions.RayError) as error:
            raise NotLoadedError(step, error) from error

    def supervise(self) -> None:
        """Train on questions with worked answers."""
        wanted = self.config.sft
        if wanted is None:
            return
        self.cluster.train("schedule", wanted.schedule, wanted.steps)
        for step in range(wanted.steps):
            drawn = data.draw(self.inputs.sft, wanted.batch, step, self.config.seed)
            answers = [
                [*self.tokens.encode(one.answer, add_special_tokens=False), self.tokens.eos_token_id] for one in drawn
            ]
            batch = self.pad([data.prompt(self.tokens, one) for one in drawn], answers)
            self.report.step("sft", step, wanted.steps, self.cluster.train("update", batch)[0])

    def schedule(self) -> None:
        """The learning rate of GRPO, over all its optimizer steps."""
        wanted = self.config.grpo
        self.cluster.train("schedule", wanted.schedule, max(wanted.steps * wanted.updates, 1))

    def reference(self, *, new: bool) -> None:
        """The policy at the start of GRPO: the weights of now, or of the run that is resumed."""
        folder = self.config.out / "reference"
        if new:
            self.cluster.train("keep_reference")
            self.cluster.train("save_reference", folder)
        elif not folder.is_dir():
            raise RunError(
                f"grpo.kl is set and {folder} is absent: this run began without it; set grpo.kl=0 or a new `out`"
            )
        else:
            self.cluster.train("load_reference", folder)

    def step(self, step: int) -> None:
        """Generate, reward, update, sync, and compare both sides before and after."""
        wanted, began = self.config.grpo, time.monotonic()
        batch, rolled, rewards = self.rollout(step)
        temperature = self.config.rollout.temperature
        batch["old"] = self.gather(self.cluster.train("logprobs", batch, temperature), batch)
        metrics: Metrics = {"reward": float(rewards.mean())}
        metrics["dlogp_rollout"] = diagnose.mean_difference(batch["old"], rolled, batch["mask"])
        batch["advantage"] = grpo.advantages(rewards, wanted.group)
        keep = batch["advantage"] != 0
        metrics["groups_used"] = float(keep.view(-1, wanted.group).any(1).float().mean())
        # Spread over the prompts: where two experts nearly tie, the responses to one prompt differ together.
        apart = max(len(rolled) // self.config.sync.probes, 1)
        probes = {name: rows[::apart][: self.config.sync.probes] for name, rows in batch.items()}
        if wanted.kl:
            batch["reference"] = self.gather(self.cluster.train("reference_logprobs", batch, temperature), batch)
        metrics |= self.update(batch, keep, step)
        metrics |= self.compared_sync(probes)
        self.recent = [*self.recent[-4:], metrics["reward"]]
        if (step + 1) % self.config.eval_every == 0 or step == 0 or step + 1 == wanted.steps or self.done():
            metrics["eval"] = self.evaluate()
        metrics["step_s"] = time.monotonic() - began
        self.report.step("grpo", step, wanted.steps, metrics)

    def rollout(self, step: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The padded batch, the rollout's log-probabilities [n, s - 1], and the rewards [n]."""
        wanted = self.config.grpo
        problems = data.draw(self.inputs.train, wanted.prompts, step, self.config.seed)
        prompts = [data.prompt(self.tokens, problem) for problem in problems]
        seed = (self.config.seed * 1_000_003 + step) * wanted.prompts
        groups = self.generate(prompts, wanted.group, self.config.rollout.temperature, seed)
        samples = [sample for group in groups for sample in group]
        texts = self.tokens.batch_decode([tokens for tokens, _ in samples], skip_special_tokens=True)
        answers = [problem.answer for problem in problems for _ in range(wanted.group)]
        rewards = torch.tensor([gsm8k_reward(text, answer) for text, answer in zip(texts, answers, strict=True)])
        heads = [prompt for prompt in prompts for _ in range(wanted.group)]
        batch = self.pad(heads, [tokens for tokens, _ in samples])
        rolled = torch.zeros_like(batch["mask"])
        for row, (head, (_, logprobs)) in enumerate(zip(heads, samples, strict=True)):
            rolled[row, len(head) - 1 : len(head) - 1 + len(logprobs)] = torch.tensor(logprobs)
        return batch, rolled, rewards

    def generate(self, prompts: list[list[int]], group: int, temperature: float, seed: int) -> list[Any]:
        """Responses of every prompt, in order, the prompts spread over the engines."""
        engines, length = self.cluster.engines, self.config.rollout.max_response
        shares = [prompts[index :: len(engines)] for index in range(len(engines))]
        calls = {
            f"rollout engine {index}": engine.generate.remote(
                share, group, length, temperature, seed + index * len(prompts), self.tokens.eos_token_id
            )
            for index, (engine, share) in enumerate(zip(engines, shares, strict=True))
        }
        found = self.cluster.get(calls)
        return [found[index % len(engines)][index // len(engines)] for index in range(len(prompts))]

    def update(self, batch: dict[str, Tensor], keep: Tensor, step: int) -> Metrics:
        """The optimizer steps on the rows whose group has spread, shuffled and split; without such rows there is none."""
        rows = torch.nonzero(keep)[:, 0]
        if not len(rows):
            return {"updated": 0.0}
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.config.seed + step))]
        found = []
        for part in rows.chunk(self.config.grpo.updates):
            share = self.fill({name: values[part] for name, values in batch.items()})
            found.append(self.cluster.train("update", share, self.config.rollout.temperature)[0])
        return {name: mean(one[name] for one in found) for name in found[0]}

    def compared_sync(self, probes: dict[str, Tensor]) -> Metrics:
        """Sync, with the probes' log-probabilities on both sides before and after; stops where they differ afterwards."""
        mask, count = probes["mask"], len(probes["tokens"])
        trained = self.gather(self.cluster.train("logprobs", self.fill(probes)), probes)[:count]
        before = diagnose.mean_difference(trained, self.score(self.cluster.engines[0], probes), mask)
        seconds = self.sync()
        worst = max(diagnose.mean_difference(trained, self.score(one, probes), mask) for one in self.cluster.engines)
        if not worst <= self.config.sync.max_dlogp and not self.unsafe:
            raise RunError(self.diagnosis(worst, trained, probes))
        return {"dlogp_before": before, "dlogp_after": worst, "sync_s": seconds}

    def sync(self) -> float:
        """Send the weights; returns how long it took, in seconds."""
        began = time.monotonic()
        self.cluster.on_trainers("sync", timeout_s=self.config.sync.timeout_s)
        return time.monotonic() - began

    def score(self, engine: Any, probes: dict[str, Tensor]) -> Tensor:
        """An engine's log-probabilities, fp32 [n, s - 1], of the probes' tokens."""
        ends = [int(torch.nonzero(row)[-1]) + 2 if row.any() else 2 for row in probes["mask"]]
        rows = [row[:end].tolist() for row, end in zip(probes["tokens"], ends, strict=True)]
        found = torch.zeros_like(probes["mask"])
        for index, scores in enumerate(self.cluster.get({"rollout engine": engine.score.remote(rows)})[0]):
            found[index, : len(scores)] = torch.tensor(scores)
        return found

    def diagnosis(self, worst: float, trained: Tensor, probes: dict[str, Tensor]) -> str:
        """Start a fresh engine on what the trainer exports, in place of the first, and compare the two."""
        self.report.say(
            "trainer and rollout differ after a sync: starting a fresh engine on the same export to compare"
        )
        synced = self.cluster.get({"rollout engine 0": self.cluster.engines[0].fingerprints.remote()})[0]
        folder = self.config.out / "diagnosis"
        self.cluster.train("save_pretrained", folder)
        fresh = self.cluster.replace_engine(folder)
        names = diagnose.differing(synced, self.cluster.get({"the fresh engine": fresh.fingerprints.remote()})[0])
        difference = diagnose.mean_difference(trained, self.score(fresh, probes), probes["mask"])
        return diagnose.explain(worst, self.config.sync.max_dlogp, names, difference)

    def evaluate(self) -> float:
        """The mean reward of one greedy response to each question of the evaluation set."""
        prompts = [data.prompt(self.tokens, problem) for problem in self.inputs.eval]
        # vLLM takes temperature 0 as greedy.
        responses = [group[0][0] for group in self.generate(prompts, 1, 0.0, self.config.seed)]
        texts = self.tokens.batch_decode(responses, skip_special_tokens=True)
        return mean(gsm8k_reward(text, one.answer) for text, one in zip(texts, self.inputs.eval, strict=True))

    def save(self, step: int) -> None:
        """A checkpoint after so many GRPO steps, where one is due."""
        last = step == self.config.grpo.steps or self.done()
        if step % self.config.save_every and not last:
            return
        self.cluster.on_trainers("save", checkpoint.partial(self.config.out, step))
        checkpoint.complete(self.config.out, step, self.config.keep)

    def done(self) -> bool:
        """Whether the reward is as high as wanted."""
        wanted = self.config.grpo.stop_reward
        return wanted is not None and len(self.recent) == 5 and mean(self.recent) >= wanted

    def pad(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Rows of one length, as many as every rank and micro-batch can share."""
        return data.pad(prompts, responses, self.config.trainer.tensor_parallel * 8, self.rows)

    @property
    def rows(self) -> int:
        """How many rows one micro-batch of every data-parallel rank takes."""
        return self.config.trainer.data_parallel * self.config.trainer.micro_batch

    def fill(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rows of zeros, whose mask is empty, up to a number that every rank and micro-batch can share."""
        missing = -len(batch["tokens"]) % self.rows
        return {name: torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) for name, rows in batch.items()}

    def gather(self, shares: list[tuple[int, Tensor] | None], batch: dict[str, Tensor]) -> Tensor:
        """Put the ranks' log-probabilities back into the order of the batch."""
        found = dict(share for share in shares if share is not None)
        rows = torch.zeros(sum(map(len, found.values())), batch["mask"].shape[1])
        for rank, values in found.items():
            rows[rank :: len(found)] = values
        return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the run came to its end, 1 with one line on stderr where it could not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--unsafe", action="store_true", help="run without the patches and past a failed comparison")
    options = parser.parse_args(arguments)
    out: Path | None = None
    try:
        config = load(options.config, options.overrides)
        out = config.out
        inputs = data.inputs(config)
        with report.Report(out) as progress, cluster.start(config, require=not options.unsafe) as actors:
            try:
                Run(config, inputs, actors, progress, unsafe=options.unsafe).run()
            finally:
                picture(out, progress)
    except (RunError, ray.exceptions.RayError, OSError) as error:
        print(f"error: {error}{resume(out, error)}", file=sys.stderr)
        return 1
    return 0


def picture(out: Path, progress: report.Report) -> None:
    """Draw the run. It is no part of it: what goes wrong here is a word, and takes the place of no error."""
    try:
        if any(row["phase"] == "grpo" for row in report.read(out)):
            progress.say(f"picture: {report.draw(out)}")
    except Exception as error:  # noqa: BLE001 # a picture may fail in a library's own way
        progress.say(f"no picture of this run: {type(error).__name__}: {error}")


def resume(out: Path | None, error: Exception) -> str:
    """What a run that has failed can go on from."""
    steps = checkpoint.saved(out) if out is not None else []
    if not steps or out is None:
        return ""
    if not isinstance(error, NotLoadedError):
        return f"\nThe checkpoint after GRPO step {steps[-1]} is whole: the same command goes on from it."
    folder = checkpoint.folder(out, error.step)
    before = [step for step in steps if step < error.step]
    then = f"goes on from step {before[-1]}" if before else "begins anew"
    return (
        f"\nThe checkpoint after GRPO step {error.step} could not be loaded: run with the sizes that it was saved with, or move "
        f"{folder} away, and the same command {then}."
    )


if __name__ == "__main__":
    raise SystemExit(main())
