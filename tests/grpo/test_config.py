"""What bad input of the GRPO example gets: one clear line, before anything starts."""

from pathlib import Path

import pytest

pytest.importorskip("omegaconf")
pytest.importorskip("pydantic")

from examples.errors import RunError
from examples.grpo.config import Config, load

PRESET = Path(__file__).parents[2] / "examples" / "grpo" / "cpu.yaml"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that let the preset find its files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("train", "eval", "sft"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    keys = {"model": "model", "data": "train.jsonl", "eval_data": "eval.jsonl", "sft.data": "sft.jsonl", "out": "run"}
    return [f"{key}={tmp_path / name}" for key, name in keys.items()]


def test_the_preset_loads_and_overrides_win(files: list[str]) -> None:
    config = load(PRESET, [*files, "grpo.steps=3", "trainer.provider.moe_aux_loss_coeff=0.0"])
    assert isinstance(config, Config)
    assert config.grpo.steps == 3
    assert config.trainer.data_parallel == 2
    assert config.trainer.provider["moe_aux_loss_coeff"] == 0.0


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("grpo.stepz=3", "grpo.stepz: no such key, the nearest is steps"),
        ("sft.lr=1", "sft.lr: no such key"),
        ("grpo.schedule.learning=1", "grpo.schedule.learning: no such key"),
        ("trainr.ranks=3", "trainr: no such key, the nearest is trainer"),
        ("grpo.steps=many", r"grpo.steps: .*integer.*found many"),
        ("grpo.group=1", r"grpo.group: .*greater than or equal to 2"),
        ("trainer.tensor_parallel=3", "tensor_parallel 3 x pipeline_parallel 1 = 3 does not divide ranks 2"),
        ("trainer.expert_parallel=4", "expert_parallel 4 x expert_tensor_parallel 1 = 4 does not divide the 2 ranks"),
        ("sync.backend=nccl", "sync.backend nccl does not go with device cpu"),
        ("grpo.updates=5", "grpo.updates 5 does not divide prompts x group"),
        ("data=/nowhere.jsonl", "data: no dataset at /nowhere.jsonl"),
        ("sft.data=/nowhere.jsonl", "sft.data: no dataset"),
        ("model=/nowhere", "model: no config.json in /nowhere"),
        ("steps", "override 'steps': write it as key=value"),
    ],
)
def test_one_clear_line(files: list[str], override: str, wanted: str) -> None:
    with pytest.raises(RunError, match=wanted) as caught:
        load(PRESET, [*files, override])
    assert "\n" not in str(caught.value)


def test_ipc_wants_as_many_gpus_on_both_sides(files: list[str]) -> None:
    with pytest.raises(RunError, match=r"= 1 must be trainer\.ranks 2"):
        load(PRESET, [*files, "device=cuda", "sync.backend=ipc"])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no configuration at"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(RunError):
        load(tmp_path / "broken.yaml")
