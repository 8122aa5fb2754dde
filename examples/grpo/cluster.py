"""Ray: the processes of a run, what goes wrong in them as one clear error, and their end."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ultra_patches
from examples.errors import RunError
from examples.grpo.config import Config
from ultra_patches.entrypoints.ray import runtime_env

#: The patches without which weights do not arrive as they were, by where they act.
TRAINER_PATCHES = ("megatron-router-bias-builder", "megatron-router-bias-fp32", "bridge-router-bias-export")
LORA_PATCHES = ("bridge-lora-merge", "bridge-lora-refit")
RELOAD_PATCHES = (
    "vllm-mamba-conv-weights",
    "vllm-reload-abandoned-session",
    "vllm-reload-duplicate-weights",
    "vllm-reload-keep-unsent",
    "vllm-reload-late-parameters",
    "vllm-reload-live-write",
    "vllm-reload-numel-guard",
)
TRANSPORT_PATCHES = {
    "ipc": ("vllm-ipc-rank-layout", "vllm-packed-alignment", "vllm-reload-receive-buffer"),
    "nccl": ("vllm-nccl-packed-streams", "vllm-packed-alignment", "vllm-reload-receive-buffer"),
    "shared_file": ("vllm-cpu-moe-prepack",),
}
#: CUDA IPC handles reach vLLM's workers by pickle, which it refuses unless told.
ENGINE_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
CPU_ENGINE_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"}
CPU_TRAINER_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class TrainerActor:
    """A rank of the trainer in a Ray worker."""

    def place(self) -> str:
        """The address of this worker's node."""
        return str(ray.util.get_node_ip_address())

    def port(self) -> int:
        """A free port on this worker's node."""
        from vllm.utils.network_utils import get_open_port

        return int(get_open_port())

    def build(self, config: Config, rank: int, address: str, port: int, require: bool) -> None:
        """Build the model, then make sure of the patches that its weights depend on."""
        from examples.grpo.policy import Policy

        self.config, self.address = config, address
        self.policy = Policy(config, rank, address, port)
        patches = TRAINER_PATCHES + (LORA_PATCHES if config.peft.enabled else ())
        for patch in patches if require else ():
            ultra_patches.require(patch)

    def connect(self, engines: list[Any], workers: int) -> None:
        """Set up the weight transfer to these engines."""
        from examples.grpo.transfer import Engines, Source, sender

        sync = self.config.sync
        source = Source(lambda: self.policy.export(cpu=self.config.device == "cpu"))
        self.send = sender(sync, Engines(engines, sync.timeout_s), source, self.policy.rank, self.address, workers)

    def sync(self) -> None:
        """Send all weights to the engines."""
        self.send()

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        from examples.grpo import trainer_state

        trainer_state.save(self.policy, folder)

    def load(self, folder: Path) -> None:
        """Read it again."""
        from examples.grpo import trainer_state

        trainer_state.load(self.policy, folder)

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the policy."""
        return getattr(self.policy, method)(*arguments)


@dataclass
class Cluster:
    """The actors of a run."""

    config: Config
    trainers: list[Any]
    engines: list[Any]
    group: Any

    def replace_engine(self, model: Path) -> Any:
        """A new engine on another checkpoint, where the first one was, which ends."""
        ray.kill(self.engines[0])
        self.engines[0] = _engine(self.config, model, self.group, 0)
        return self.engines[0]

    def train(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the policy on every rank; a rank that dies ends the wait."""
        return self.get({f"trainer rank {i}": a.call.remote(method, *arguments) for i, a in enumerate(self.trainers)})

    def on_trainers(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of the actors themselves on every rank."""
        calls = {f"trainer rank {i}": getattr(a, method).remote(*arguments) for i, a in enumerate(self.trainers)}
        return self.get(calls, timeout_s)

    def on_engines(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every engine."""
        return self.get(
            {f"rollout engine {i}": getattr(a, method).remote(*arguments) for i, a in enumerate(self.engines)}
        )

    @staticmethod
    def get(calls: dict[str, Any], timeout_s: float | None = None) -> list[Any]:
        """Results in order. RunError names the first that failed; the others may wait for it forever and are left."""
        names = {reference: name for name, reference in calls.items()}
        waiting = list(names)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=timeout_s)
            if not ready:
                raise RunError(
                    f"no answer from {', '.join(names[r] for r in waiting)} within {timeout_s:.0f} s: see sync.timeout_s"
                )
            for reference in ready:
                try:
                    ray.get(reference)
                except ray.exceptions.GetTimeoutError as error:
                    raise RunError(f"{names[reference]}: weight sync timed out: {_last_line(error)}") from error
                except ray.exceptions.RayActorError as error:
                    raise RunError(f"{names[reference]} died: {_last_line(error)}") from error
                except ray.exceptions.RayTaskError as error:
                    raise RunError(f"{names[reference]} failed: {_cause(error)}") from error
        return [ray.get(reference) for reference in calls.values()]


def _cause(error: Any) -> str:
    cause = getattr(error, "cause", error)
    if isinstance(cause, ray.exceptions.GetTimeoutError):
        return "an engine did not answer within sync.timeout_s during a weight sync"
    return f"{type(cause).__name__}: {_last_line(cause)}"


def _last_line(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextlib.contextmanager
def start(config: Config, *, require: bool) -> Iterator[Cluster]:
    """Start Ray, trainers and engines; every process of the run has ended when the block is left."""
    # A worker's own children, such as vLLM's EngineCore, end with it even when it is killed.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    # "local" is Ray's word for a cluster of our own, where another one runs on this machine too.
    options: dict[str, Any] = {"address": config.ray}
    if config.ray == "local":
        options |= {"include_dashboard": False, "num_cpus": config.trainer.ranks + config.rollout.engines}
    ray.init(runtime_env=runtime_env({}), log_to_driver=False, logging_level="ERROR", **options)
    try:
        yield _actors(config, require=require)
    finally:
        ray.shutdown()


def _actors(config: Config, *, require: bool) -> Cluster:
    cpu = config.device == "cpu"
    per_engine = config.rollout.tensor_parallel * config.rollout.pipeline_parallel
    workers = config.rollout.engines * per_engine
    shared = config.sync.backend == "ipc"
    device = "CPU" if cpu else "GPU"
    bundles = [{"CPU": 1} if cpu else {"GPU": 1, "CPU": 1}] * (config.trainer.ranks + (0 if shared else workers))
    group = ray.util.placement_group(bundles)
    if not group.wait(120):
        raise RunError(f"the Ray cluster has no room for {len(bundles)} {device}s: {ray.available_resources()}")
    trainers = []
    for rank in range(config.trainer.ranks):
        environment = CPU_TRAINER_ENVIRONMENT if cpu else {}
        trainers.append(
            ray.remote(TrainerActor)
            .options(
                num_cpus=1 if cpu else 0,
                num_gpus=0 if cpu else (0.4 if shared else 1),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
                runtime_env={"env_vars": environment},
            )
            .remote()
        )
    address = Cluster.get({"trainer rank 0": trainers[0].place.remote()})[0]
    port = Cluster.get({"trainer rank 0": trainers[0].port.remote()})[0]
    engines = [_engine(config, config.model, group, index) for index in range(config.rollout.engines)]
    cluster = Cluster(config, trainers, engines, group)
    cluster.get(
        {
            f"trainer rank {rank}": trainer.build.remote(config, rank, address, port, require)
            for rank, trainer in enumerate(trainers)
        }
    )
    patches = (*RELOAD_PATCHES, *TRANSPORT_PATCHES[config.sync.backend])
    cluster.on_engines("require", patches if require else ())
    cluster.on_trainers("connect", engines, workers, timeout_s=config.sync.timeout_s)
    return cluster


def _engine(config: Config, model: Path, group: Any, index: int) -> Any:
    """An engine on its share of the placement group: behind the trainers' bundles, or with IPC in them."""
    from examples.grpo.rollout import Rollout

    cpu, shared = config.device == "cpu", config.sync.backend == "ipc"
    count = config.rollout.tensor_parallel * config.rollout.pipeline_parallel
    first = (0 if shared else config.trainer.ranks) + index * count
    environment = ENGINE_ENVIRONMENT | (CPU_ENGINE_ENVIRONMENT if cpu else {})
    if not cpu:
        environment |= {
            "VLLM_RAY_PER_WORKER_GPUS": "0.4" if shared else "1",
            "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, range(first, first + count))),
        }
    where = PlacementGroupSchedulingStrategy(group, first, placement_group_capture_child_tasks=True)
    actor = ray.remote(Rollout).options(num_cpus=1 if cpu else 0, num_gpus=0, scheduling_strategy=where)
    return actor.remote(config, model, environment)
