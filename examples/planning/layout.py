"""A parallel layout of trainer and rollout, and the GPUs under it."""

from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal

#: MiB of memory as nvidia-smi reports it: 80, 141, 180 and 186 GB parts.
GPU_MIB = {"h100": 81559, "h200": 143771, "b200": 183359, "gb200": 189471}

#: The linears that Megatron-Bridge's recipe adapts in Nemotron-3-Ultra (recipes/nemotronh/h100/nemotron_3_ultra.py, 0.6.2).
ULTRA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")


@dataclass(frozen=True)
class Lora:
    """What Megatron-Bridge's LoRA adapts (peft/lora.py, 0.6.2), with its defaults."""

    dim: int = 32
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    exclude: tuple[str, ...] = ()
    #: One adapter for all routed experts of a GPU, or one an expert.
    share_expert_adapters: bool = True

    def adapts(self, module: str) -> bool:
        """Whether a linear of that full name gets an adapter: by its last word, or by a pattern for the whole name."""
        word = module.rpartition(".")[2]
        if self.targets:
            return any(word == target or fnmatch(module, target) for target in self.targets)
        return not any(word == name or fnmatch(module, name) for name in self.exclude)


@dataclass(frozen=True)
class Trainer:
    """Megatron's ranks, and the bytes of one element of what they hold."""

    gpus: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = True
    #: Megatron-Bridge leaves the vocabulary as it is unless `should_pad_vocab` is set.
    pad_vocab: bool = False
    weight_bytes: int = 2
    #: 2: `grad_reduce_in_fp32` is off.
    grad_bytes: int = 4
    #: fp32 master weights, and each of Adam's two moments; 2: `use_precision_aware_optimizer` with bf16.
    main_bytes: int = 4
    moment_bytes: int = 4
    #: `optimizer_cpu_offload`: master weights and moments are in host memory.
    optimizer_on_host: bool = False
    #: Gradients and optimizer are moved to host memory while vLLM generates and weights are synced.
    offload_for_rollout: bool = False
    lora: Lora | None = None

    @property
    def stage_gpus(self) -> int:
        """Ranks of a pipeline stage."""
        return self.gpus // self.pp

    @property
    def dp(self) -> int:
        """Copies of the dense weights, over which their optimizer is sharded."""
        return self.stage_gpus // self.tp

    @property
    def expert_dp(self) -> int:
        """Copies of the routed experts, over which theirs is."""
        return self.stage_gpus // (self.ep * self.etp)


@dataclass(frozen=True)
class Rollout:
    """vLLM's GPUs, as many engines as fit."""

    gpus: int
    tp: int = 1
    pp: int = 1
    #: Experts are whole, and dealt out over the tensor-parallel ranks.
    expert_parallel: bool = False
    #: Sleep mode: the weights leave the GPU while the trainer trains.
    sleep: bool = False
    #: On CPUs vLLM keeps some routers in fp32.
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def ep(self) -> int:
        """Over how many ranks the experts are dealt out."""
        return self.tp if self.expert_parallel else 1


@dataclass(frozen=True)
class Sync:
    """The transport of weights: `ipc` on the same GPUs, `nccl` between different ones."""

    backend: Literal["ipc", "nccl", "shared_file"]
    buffer_mib: int = 512
    packed: bool = True


@dataclass(frozen=True)
class Layout:
    """Everything; `memory` and `reserve` are bytes a GPU."""

    trainer: Trainer
    rollout: Rollout
    sync: Sync
    memory: int
    gpus_per_node: int = 8
    #: For CUDA contexts, NCCL, activations and the KV cache: what has to remain for a layout to fit.
    reserve: int = field(default=8 << 30)

    @property
    def colocated(self) -> bool:
        """Trainer and engines share their GPUs."""
        return self.sync.backend == "ipc"
