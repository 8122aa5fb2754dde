"""The settings of a run: a YAML file, `key=value` overrides on top, checked before anything starts."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from yaml import YAMLError

from examples.errors import RunError

InitMethod = Literal["xavier", "normal", "kaiming", "zero"]


class Section(BaseModel):
    """Frozen, and no key that is not declared."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Schedule(Section):
    """Learning rate: linear warm-up to `lr`, then cosine to `min_lr`, both over optimizer steps."""

    lr: PositiveFloat
    min_lr: float = Field(0.0, ge=0)
    warmup: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: PositiveFloat = 1.0
    #: On resume: the values of this file win over those of the checkpoint.
    override_on_resume: bool = False


class Trainer(Section):
    """Megatron's ranks. The data-parallel size is what tensor and pipeline parallel leave of `ranks`."""

    ranks: PositiveInt
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    expert_tensor_parallel: PositiveInt = 1
    sequence_parallel: bool = False
    #: False builds the model from core's own layers, where transformer-engine is not installed.
    transformer_engine: bool = True
    micro_batch: PositiveInt = 1
    #: Attributes of Megatron-Bridge's provider, such as moe_router_bias_update_rate.
    provider: dict[str, Any] = {}
    #: Fields of Megatron-Core's OptimizerConfig, such as optimizer_cpu_offload.
    optimizer: dict[str, Any] = {}

    @property
    def data_parallel(self) -> int:
        """How many copies of the dense layers there are."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel)

    @model_validator(mode="after")
    def _sizes(self) -> "Trainer":
        model = self.tensor_parallel * self.pipeline_parallel
        if self.ranks % model:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} x pipeline_parallel {self.pipeline_parallel} = {model} does not "
                f"divide ranks {self.ranks}"
            )
        stage = self.ranks // self.pipeline_parallel
        expert = self.expert_parallel * self.expert_tensor_parallel
        if stage % expert:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} x expert_tensor_parallel {self.expert_tensor_parallel} = {expert} "
                f"does not divide the {stage} ranks of a pipeline stage"
            )
        return self


class Peft(Section):
    """LoRA (Hu et al. 2021) by Megatron-Bridge: adapters alone are trained, and the rollout gets them merged.

    The fields are those of megatron.bridge.peft.lora.LoRA in 0.6.2. The reference policy is the model without adapters.
    """

    enabled: bool = False
    #: Module names or patterns of Megatron's, such as linear_qkv or *.layers.0.*.linear_proj.
    target_modules: list[str] = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    #: Every linear layer but these; target_modules is to be empty then.
    exclude_modules: list[str] = []
    dim: PositiveInt | None = None
    alpha: PositiveInt | None = None
    dropout: float = Field(0.0, ge=0, lt=1)
    dropout_position: Literal["pre", "post"] = "pre"
    lora_A_init_method: InitMethod = "xavier"  # noqa: N815 # Megatron-Bridge's name
    lora_B_init_method: InitMethod = "zero"  # noqa: N815 # as above
    a2a_experimental: bool = False
    #: None is the model's.
    lora_dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @model_validator(mode="after")
    def _complete(self) -> "Peft":
        if missing := [name for name in ("dim", "alpha") if self.enabled and getattr(self, name) is None]:
            raise ValueError(f"enabled without {' and '.join(missing)}: set them, such as dim: 32, alpha: 64")
        if self.enabled and bool(self.target_modules) == bool(self.exclude_modules):
            raise ValueError("give either target_modules or exclude_modules, and leave the other one empty: []")
        return self


class Rollout(Section):
    """vLLM's engines."""

    engines: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    max_response: PositiveInt = 256
    temperature: PositiveFloat = 1.0
    prefix_caching: bool = True
    #: Further arguments of vllm.LLM, such as gpu_memory_utilization.
    engine: dict[str, Any] = {}


class Sync(Section):
    """How weights get from the trainer to the engines.

    ipc: both on the same GPUs. nccl: on different ones. shared_file: no GPU.
    """

    backend: Literal["ipc", "nccl", "shared_file"]
    packed: bool = True
    buffer_mib: PositiveInt = 512
    timeout_s: PositiveFloat = 600
    #: Largest mean |trainer - rollout| of log-probabilities after a sync, in nats; above it the run stops.
    max_dlogp: PositiveFloat = 0.05
    #: Sequences of each step that both sides score before and after the sync.
    probes: PositiveInt = 16


class Grpo(Section):
    """Group relative policy optimisation (Shao et al. 2024, DeepSeekMath)."""

    #: 0 ends after the supervised steps.
    steps: int = Field(ge=0)
    prompts: PositiveInt = 32
    group: PositiveInt = Field(8, ge=2)
    updates: PositiveInt = 1
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    kl: float = Field(0.0, ge=0)
    schedule: Schedule
    #: End when the mean reward of the last five steps is at least this.
    stop_reward: float | None = None


class Sft(Section):
    """Supervised steps before the first rollout, on a file of questions and worked answers."""

    steps: PositiveInt
    data: Path
    batch: PositiveInt = 64
    schedule: Schedule


class Config(Section):
    """Everything. Paths are relative to the working directory."""

    model: Path
    data: Path
    eval_data: Path | None = None
    out: Path
    seed: int = 0
    device: Literal["cuda", "cpu"] = "cuda"
    #: Of weights and activations, on both sides.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    #: `local` starts Ray here, anything else is the address of a cluster.
    ray: str = "local"
    save_every: PositiveInt = 20
    eval_every: PositiveInt = 20
    keep: PositiveInt = 2
    trainer: Trainer
    rollout: Rollout = Rollout()
    sync: Sync
    sft: Sft | None = None
    peft: Peft = Peft()
    grpo: Grpo
    #: Write the trained model there at the end, as a Hugging Face checkpoint; adapters are merged in it.
    export: Path | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if (self.device == "cpu") != (self.sync.backend == "shared_file"):
            raise ValueError(f"sync.backend {self.sync.backend} does not go with device {self.device}")
        gpus = self.rollout.engines * self.rollout.tensor_parallel * self.rollout.pipeline_parallel
        if self.sync.backend == "ipc" and gpus != self.trainer.ranks:
            raise ValueError(
                f"sync.backend ipc: rollout.engines x tensor_parallel x pipeline_parallel = {gpus} must be trainer.ranks "
                f"{self.trainer.ranks}, for weights pass between processes of one GPU"
            )
        if self.peft.enabled and self.trainer.provider.get("moe_router_bias_update_rate"):
            raise ValueError(
                "peft.enabled: adapters alone are trained, set trainer.provider.moe_router_bias_update_rate to 0"
            )
        if self.export is not None and self.export.exists():
            raise ValueError(f"export: {self.export} is there already: name a new folder, or remove it")
        if (self.grpo.prompts * self.grpo.group) % self.grpo.updates:
            raise ValueError(f"grpo.updates {self.grpo.updates} does not divide prompts x group")
        return self


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the file, put the overrides over it and check; RunError names every fault, a line each."""
    if not path.is_file():
        raise RunError(f"no configuration at {path}: give a YAML file, such as examples/grpo/cpu.yaml")
    if stray := [text for text in overrides if "=" not in text]:
        raise RunError(f"override {stray[0]!r}: write it as key=value, such as grpo.steps=10")
    try:
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise RunError(f"{path}: {' '.join(str(error).split())}") from error
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise RunError(f"{path}: " + "\n".join(map(_fault, error.errors()))) from error
    _present(config)
    return config


def _fault(error: Any) -> str:
    """One line: which key, what is wrong, and for an unknown key the nearest that there is."""
    where = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{where + ': ' if where else ''}{error['msg'].removeprefix('Value error, ')} (found {_short(error['input'])})"
    section: Any = Config
    for name in error["loc"][:-1]:
        section = _section(section.model_fields[name].annotation)
    close = difflib.get_close_matches(error["loc"][-1], section.model_fields, n=1, cutoff=0.0)
    return f"{where}: no such key, the nearest is {close[0]}"


def _section(annotation: Any) -> Any:
    """The section of `Sft | None` too."""
    options = getattr(annotation, "__args__", (annotation,))
    return next(option for option in options if isinstance(option, type) and issubclass(option, Section))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _present(config: Config) -> None:
    """The files that a run reads are there."""
    if not (config.model / "config.json").is_file():
        raise RunError(f"model: no config.json in {config.model}: give the folder of a Hugging Face checkpoint")
    files = {"data": config.data, "eval_data": config.eval_data, "sft.data": config.sft and config.sft.data}
    for key, path in files.items():
        if path is not None and not path.is_file():
            raise RunError(
                f"{key}: no dataset at {path}: give a JSON-lines file with `question` and `answer` in each line"
            )
