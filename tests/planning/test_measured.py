"""The plan against models that Megatron-Bridge and vLLM build: every rank's parameters and bytes, to the last one."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.planning import megatron, model, vllm
from examples.planning.layout import Rollout
from examples.planning.megatron import Stage
from tests.planning import vllm_case
from tests.planning.tiny import CASES, MODELS, Case
from tests.support import Run

PARAMETERS = ("dense", "experts", "dense_adapters", "expert_adapters")


@pytest.fixture(scope="session")
def on_megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """What each of four ranks holds, by case."""
    return _run("megatron_case.py", tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="session")
def in_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Bytes that each worker of an engine loaded."""
    return _run("vllm_case.py", tmp_path_factory.mktemp("engines"), "engines")


@pytest.fixture(scope="session")
def on_vllm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """(pipeline rank, bytes) of each of four ranks, by layout."""
    return _run("vllm_case.py", tmp_path_factory.mktemp("vllm"), "models")


def _run(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    seen: dict[str, Any] = Run(f"tests/planning/{script}", (), arguments).execute(folder)["seen"]
    return seen


@cache
def _stages(case: Case) -> list[Stage]:
    return megatron.stages(model.from_config(MODELS[case.model]), case.trainer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_megatron_rank_holds_the_parameters_of_the_plan(case: Case, on_megatron: dict[str, Any]) -> None:
    ranks = on_megatron[str(case)]
    assert {rank["stage"] for rank in ranks} == set(range(case.trainer.pp))
    for rank in ranks:
        stage = _stages(case)[rank["stage"]]
        assert {key: rank[key] for key in PARAMETERS} == {key: getattr(stage, key) for key in PARAMETERS}
        assert rank["weights"] == megatron.bytes_of(stage, case.trainer)["weights"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_plan_but_for_padding(case: Case, on_megatron: dict[str, Any]) -> None:
    for rank in on_megatron[str(case)]:
        planned = megatron.bytes_of(_stages(case)[rank["stage"]], case.trainer)["gradients"]
        # Each parameter begins at a multiple of 64 elements of fp32.
        assert 0 <= rank["gradients"] - planned <= 63 * 4 * rank["trained tensors"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_optimizer_of_all_ranks_is_that_of_the_plan(case: Case, on_megatron: dict[str, Any]) -> None:
    trainer = case.trainer
    for index, stage in enumerate(_stages(case)):
        ranks = [rank["optimizer"] for rank in on_megatron[str(case)] if rank["stage"] == index]
        dense, experts = (stage.dense_adapters, stage.expert_adapters) if trainer.lora else (stage.dense, stage.experts)
        # Master weight and two moments of fp32, of each weight once; those that TP repeats, once a TP rank.
        assert sum(ranks) == 12 * (dense * trainer.tp + experts * trainer.ep * trainer.etp)
        planned = megatron.bytes_of(stage, trainer)["optimizer"]
        assert planned == pytest.approx(sum(ranks) / len(ranks), abs=24)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "rollout"), vllm_case.ENGINES, ids=[vllm_case.name(*engine) for engine in vllm_case.ENGINES]
)
def test_a_vllm_engine_holds_the_bytes_of_the_plan(name: str, rollout: Rollout, in_engines: dict[str, Any]) -> None:
    planned = vllm.rank_bytes(model.from_config(MODELS[name]), replace(rollout, device="cpu"))
    assert in_engines[vllm_case.name(name, rollout)] == planned * rollout.tp


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "rollout"), vllm_case.LAYOUTS, ids=[vllm_case.name(*layout) for layout in vllm_case.LAYOUTS]
)
def test_vllms_models_hold_the_bytes_of_the_plan(name: str, rollout: Rollout, on_vllm: dict[str, Any]) -> None:
    planned = vllm.rank_bytes(model.from_config(MODELS[name]), replace(rollout, device="cpu"))
    ranks = on_vllm[vllm_case.name(name, rollout)]
    assert {stage for stage, _ in ranks} == set(range(rollout.pp))
    assert [seen for _, seen in ranks] == [planned[stage] for stage, _ in ranks]
