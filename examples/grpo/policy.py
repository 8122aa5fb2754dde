"""One rank of the policy in training: a Megatron-Core model made by Megatron-Bridge, with Megatron's optimizer.

Every method is a collective: it is called on all ranks with the same arguments.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.grpo import lora, losses, plain_layers
from examples.grpo.config import Config, Schedule
from examples.grpo.losses import Batch


class Policy:
    """Holds the wrapped model, its optimizer and its learning-rate schedule."""

    def __init__(self, config: Config, rank: int, address: str, port: int) -> None:
        self.config, self.sizes, self.dtype = config, config.trainer, getattr(torch, config.dtype)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.sizes.ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        if config.device == "cpu":
            from examples.grpo import megatron_on_cpu

            torch.set_num_threads(1)
            megatron_on_cpu.prepare()
            self.device = torch.device("cpu")
            dist.init_process_group("gloo", rank=rank, world_size=self.sizes.ranks)
        else:
            self.device = torch.device("cuda", torch.cuda.current_device())
            dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=self.sizes.ranks, device_id=self.device)
        self.rank = rank
        self._build()

    def _build(self) -> None:
        if not self.sizes.transformer_engine:
            plain_layers.prepare()
        from megatron.bridge import AutoBridge
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.utils import get_model_config

        self.bridge = AutoBridge.from_hf_pretrained(str(self.config.model), torch_dtype=self.dtype)
        provider = self.bridge.to_megatron_provider(load_weights=True)
        half = self.dtype is torch.bfloat16
        settings = {
            "tensor_model_parallel_size": self.sizes.tensor_parallel,
            "pipeline_model_parallel_size": self.sizes.pipeline_parallel,
            "expert_model_parallel_size": self.sizes.expert_parallel,
            "expert_tensor_parallel_size": self.sizes.expert_tensor_parallel,
            "sequence_parallel": self.sizes.sequence_parallel,
            "bf16": half,
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "use_cpu_initialization": self.config.device == "cpu",
            # The loss is a sum over tokens, divided by their number over all ranks and micro-batches.
            "calculate_per_token_loss": True,
            **({"moe_router_bias_update_rate": 0.0} if self.config.peft.enabled else {}),
            **self.sizes.provider,
        }
        for name, value in settings.items():
            if not hasattr(provider, name):
                raise AttributeError(f"trainer.provider: {type(provider).__name__} has no {name}")
            setattr(provider, name, value)
        if not self.sizes.transformer_engine:
            plain_layers.use(provider)
        if self.config.peft.enabled:
            lora.add(provider, self.config.peft)
        provider.finalize()
        provider.initialize_model_parallel(seed=self.config.seed)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = provider.provide_distributed_model(ddp_config=ddp, bf16=half)
        optimizer: dict[str, Any] = {
            "optimizer": "adam",
            "lr": 1.0,
            "bf16": half,
            "params_dtype": self.dtype,
            "use_distributed_optimizer": True,
            "clip_grad": 1.0,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**{**optimizer, **self.sizes.optimizer}), self.model)
        model_config = get_model_config(self.model[0])
        model_config.finalize_model_grads_func = finalize_model_grads
        model_config.grad_scale_func = self.optimizer.scale_loss
        model_config.no_sync_func = (
            self.model[0].no_sync if len(self.model) == 1 else [part.no_sync for part in self.model]
        )

    def schedule(self, wanted: Schedule, steps: int) -> None:
        """Begin a learning-rate schedule of so many optimizer steps."""
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.optimizer.config.clip_grad = wanted.clip_grad
        self.set_rates(wanted.lr, wanted.min_lr)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=wanted.lr,
            min_lr=wanted.min_lr,
            lr_warmup_steps=wanted.warmup,
            lr_decay_steps=max(steps, wanted.warmup + 1),
            lr_decay_style="cosine",
            start_wd=wanted.weight_decay,
            end_wd=wanted.weight_decay,
            wd_incr_steps=steps,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=not wanted.override_on_resume,
            override_opt_param_scheduler=wanted.override_on_resume,
        )

    def set_rates(self, highest: float, lowest: float) -> None:
        """The optimizer's own bounds of the learning rate, which go before the scheduler's."""
        for group in self.optimizer.param_groups:
            group["max_lr"], group["min_lr"] = highest, lowest

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> tuple[int, Tensor] | None:
        """(data-parallel rank, log-probabilities of tokens 1 to s - 1, fp32 [n / dp, s - 1]); None on ranks without logits."""
        for part in self.model:
            part.eval()
        with torch.no_grad():
            found = self._run(batch, losses.scores, temperature, forward_only=True)
        return (self._data_rank(), torch.cat(found).cpu()) if found and self._speaks() else None

    def update(self, batch: Batch, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step: GRPO's where the batch has advantages, else a supervised one. Returns what to log."""
        for part in self.model:
            part.train()
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        kind = partial(losses.clipped_policy, self.config.grpo) if "advantage" in batch else losses.supervised
        found = self._run(batch, kind, temperature, forward_only=False)
        # Before the step: a schedule that warms up begins at zero.
        self.scheduler.step(increment=1)
        updated, norm, _ = self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        sums = torch.stack([part["sums"] for part in found]).sum(0) if found else torch.zeros(3)
        from megatron.core import parallel_state

        sums = sums.to(self.device)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        tokens = max(float(sums[2]), 1.0)
        return {
            "grad_norm": float(norm),
            "updated": float(updated),
            "lr": float(rate),
            "loss": float(sums[0]) / tokens,
            "clipped": float(sums[1]) / tokens,
        }

    def _run(self, batch: Batch, kind: Callable[..., Any], temperature: float, *, forward_only: bool) -> list[Any]:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        mine = {
            name: rows[self._data_rank() :: parallel_state.get_data_parallel_world_size()]
            for name, rows in batch.items()
        }
        count = len(mine["tokens"]) // self.sizes.micro_batch
        parts = [
            {name: rows.to(self.device) for name, rows in zip(mine, split, strict=True)}
            for split in zip(*(rows.split(self.sizes.micro_batch) for rows in mine.values()), strict=True)
        ]

        def step(iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            part = next(iterator)
            tokens = part["tokens"]
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return model(input_ids=tokens, position_ids=positions, attention_mask=None), partial(
                kind, part, temperature
            )

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(parts) if len(self.model) == 1 else [iter(parts) for _ in self.model],
            model=self.model,
            num_microbatches=count,
            seq_length=batch["tokens"].shape[1],
            micro_batch_size=self.sizes.micro_batch,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @staticmethod
    def _data_rank() -> int:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank()

    @staticmethod
    def _speaks() -> bool:
        """One rank of each tensor-parallel group answers for it."""
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_rank() == 0

    def export(self, *, cpu: bool) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) pairs, router biases in fp32, all others in the model's dtype."""
        # Said for adapters alone: releases before LoRA was merged do not have the argument.
        merge = {"merge_adapter_weights": True} if self.config.peft.enabled else {}
        yield from self.bridge.export_hf_weights(self.model, cpu=cpu, show_progress=False, **merge)

    def describe(self) -> str:
        """What is trained, for the log."""
        return lora.describe(self.model)

    def keep_reference(self) -> None:
        """Keep the weights of this moment, in host memory, as the reference policy."""
        self.reference = [{name: _copy(value) for name, value in part.state_dict().items()} for part in self.model]

    def save_reference(self, folder: Path) -> None:
        """Write this rank's share of the reference policy."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.reference, folder / f"rank-{self.rank}.pt")

    def load_reference(self, folder: Path) -> None:
        """Read it again; the layout of ranks must be the same."""
        # Extra states of some layers are bytes.
        with torch.serialization.safe_globals([io.BytesIO]):
            self.reference = torch.load(folder / f"rank-{self.rank}.pt", weights_only=True)

    def reference_logprobs(self, batch: Batch, temperature: float) -> tuple[int, Tensor] | None:
        """As `logprobs`, under the reference policy: the weights that were kept, or the model without its adapters."""
        with lora.without(self.model) if self.config.peft.enabled else self._in_place(self.reference):
            return self.logprobs(batch, temperature)

    @contextlib.contextmanager
    def _in_place(self, states: list[dict[str, Any]]) -> Iterator[None]:
        """Other weights for a while; strict in both directions, so that no weight stays behind."""
        current = [{name: _copy(value) for name, value in part.state_dict().items()} for part in self.model]
        try:
            for part, state in zip(self.model, states, strict=True):
                part.load_state_dict(state, strict=True)
            yield
        finally:
            for part, state in zip(self.model, current, strict=True):
                part.load_state_dict(state, strict=True)

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, in the files of the one that the run began with.

        A folder that is there is replaced, when the new one is whole.
        """
        partial = folder.with_name(f"{folder.name}.partial")
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self.config.model, partial, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
        # What the model was told to leave out, such as multi-token prediction, is no error.
        self.bridge.hf_pretrained.state.source.save_generator(self.export(cpu=True), partial, strict=False)
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        dist.barrier()


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
