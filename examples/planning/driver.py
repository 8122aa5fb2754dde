"""A layout from a configuration of `examples.grpo`."""

from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from examples.errors import RunError
from examples.grpo import config as grpo
from examples.planning.layout import Lora, Rollout, Sync, Trainer

Section = TypeVar("Section", bound=BaseModel)


def read(path: Path) -> tuple[Path, Trainer, Rollout, Sync]:
    """The model's config.json, Megatron's ranks, vLLM's GPUs and the transport.

    Nothing but `model`, `trainer`, `rollout`, `sync` and `peft` is read, and no file needs to exist but this one.
    """
    values = _values(path)
    trainer = _section(path, values, "trainer", grpo.Trainer)
    rollout = _section(path, values, "rollout", grpo.Rollout)
    sync = _section(path, values, "sync", grpo.Sync)
    gpus = rollout.engines * rollout.tensor_parallel * rollout.pipeline_parallel
    return (
        Path(values.get("model", "")) / "config.json",
        Trainer(
            gpus=trainer.ranks,
            tp=trainer.tensor_parallel,
            pp=trainer.pipeline_parallel,
            ep=trainer.expert_parallel,
            etp=trainer.expert_tensor_parallel,
            sequence_parallel=trainer.sequence_parallel,
            pad_vocab=bool(trainer.provider.get("should_pad_vocab", False)),
            # All of it: what fraction is on the host is not counted.
            optimizer_on_host=bool(trainer.optimizer.get("optimizer_cpu_offload", False)),
            lora=_lora(values.get("peft")),
        ),
        Rollout(
            gpus=gpus,
            tp=rollout.tensor_parallel,
            pp=rollout.pipeline_parallel,
            expert_parallel=bool(rollout.engine.get("enable_expert_parallel", False)),
            sleep=bool(rollout.engine.get("enable_sleep_mode", False)),
            device="cpu" if values.get("device") == "cpu" else "cuda",
        ),
        Sync(sync.backend, sync.buffer_mib, sync.packed),
    )


def _values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RunError(f"no configuration at {path}: give a YAML file, such as examples/grpo/cpu.yaml")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise RunError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RunError(f"{path}: holds no keys: give a YAML file, such as examples/grpo/cpu.yaml")
    return {str(key): value for key, value in values.items()}


def _section(path: Path, values: dict[str, Any], name: str, kind: type[Section]) -> Section:
    try:
        return kind.model_validate(values.get(name) or {})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (name, *first["loc"])))
        raise RunError(f"{path}: {key}: {first['msg'].removeprefix('Value error, ')}") from error


def _lora(section: Any) -> Lora | None:
    """The adapter, where a section `peft` enables one. Keys that say nothing about sizes are passed over."""
    if not isinstance(section, dict) or not section.get("enabled", False):
        return None
    values: dict[str, Any] = {}
    if section.get("dim"):
        values["dim"] = int(section["dim"])
    if section.get("target_modules") is not None:
        values["targets"] = tuple(section["target_modules"])
    elif section.get("exclude_modules"):
        values["targets"] = ()
    if section.get("exclude_modules"):
        values["exclude"] = tuple(section["exclude_modules"])
    if "share_expert_adapters" in section:
        values["share_expert_adapters"] = bool(section["share_expert_adapters"])
    return Lora(**values)
