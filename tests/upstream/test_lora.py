"""Exports of models under Megatron-Bridge's LoRA: merged with every adapter, or refused with the names."""

from typing import Any

import pytest

from tests.support import Run, states

pytestmark = pytest.mark.upstream

REFIT, MERGE = "bridge-lora-refit", "bridge-lora-merge"
#: Each Bridge with a core it was released for.
BRIDGES = {"0.3.1": "0.16.1", "0.4.2": "0.17.1", "0.6.2": "0.19.2"}
DOWN = "model.layers.0.mlp.down_proj"
#: Experts in one tensor as Hugging Face has it, and apart (SequentialMLP, which 0.3 does not export); Mamba's in_proj.
_MAMBA = "26 of 32 rows of Mamba's in_proj are not merged with their own"
_OWN = "are not merged with their own adapter"
WRONG = {
    "0.3.1": (f"rank 0: {_MAMBA}", f"rank 1: {_MAMBA}"),
    "0.4.2": (
        f"rank 0: in one tensor, experts 0, 1, 2, 3 {_OWN}; apart, experts 2, 3 {_OWN}; {_MAMBA}",
        f"rank 1: in one tensor, experts 0, 1, 2, 3 {_OWN}; apart, experts 0, 1 {_OWN}; {_MAMBA}",
    ),
    "0.6.2": (
        f"rank 0: in one tensor, experts 2, 3 {_OWN}; apart, experts 2, 3 {_OWN}; {_MAMBA}",
        f"rank 1: in one tensor, experts 0, 1 {_OWN}; apart, experts 0, 1, 2, 3 {_OWN}; {_MAMBA}",
    ),
}


def on(*versions: str, **environment: str) -> pytest.MarkDecorator:
    """Run a test on releases of Megatron-Bridge, each with its core."""
    runs = [
        Run(
            "tests/upstream/lora_case.py",
            (("megatron-bridge", version), ("megatron-core", BRIDGES[version])),
            environment=tuple(environment.items()),
        )
        for version in versions
    ]
    return pytest.mark.parametrize("outcome", runs, indirect=True, ids=str)


def version(outcome: dict[str, Any]) -> str:
    found: str = outcome["status"][REFIT]["version"]
    return found


@on(*BRIDGES)
def test_an_unmerged_export_is_refused_with_the_names_and_what_to_type(outcome: dict[str, Any]) -> None:
    assert states(outcome)[REFIT] == "applied", outcome["status"][REFIT]
    refused = outcome["toy"]["unmerged"]["refused"]
    assert f"the adapters of 1 weights: {DOWN}.base_layer.weight." in refused
    assert "merge_adapter_weights=True" in refused
    assert "export_adapter_weights or save_hf_adapter" in refused
    assert "ULTRA_PATCHES_ALLOW_UNMERGED=1" in refused


@on(*BRIDGES)
def test_it_is_refused_by_the_call_and_not_in_the_middle_of_an_export(outcome: dict[str, Any]) -> None:
    assert outcome["toy"]["unmerged, not iterated"] == outcome["toy"]["unmerged"]


@on(*BRIDGES, ULTRA_PATCHES="off")
def test_without_the_overlay_names_that_vllm_does_not_have_are_exported(outcome: dict[str, Any]) -> None:
    assert outcome["toy"]["unmerged"] == {"names": [f"{DOWN}.base_layer.weight"]}
    assert outcome["toy"]["unmerged, not iterated"] == {"names": ["generator"]}


@on(*BRIDGES)
def test_a_receiver_that_knows_the_names_can_have_them(outcome: dict[str, Any]) -> None:
    assert outcome["toy"]["allowed"] == {"names": [f"{DOWN}.base_layer.weight"]}


@on(*BRIDGES)
def test_a_model_without_adapters_is_exported_as_ever(outcome: dict[str, Any]) -> None:
    assert outcome["toy"]["without adapters"] == {"names": [f"{DOWN}.weight"]}


@on(*BRIDGES)
@pytest.mark.parametrize("what", ["same twice", "trainer unchanged"])
def test_a_merged_export_leaves_the_trainer_as_it_is(outcome: dict[str, Any], what: str) -> None:
    assert outcome["toy"]["merged"] == [True, True]
    assert outcome["toy"][what]


@on(*BRIDGES)
def test_dora_is_refused_where_it_would_be_merged_as_lora(outcome: dict[str, Any]) -> None:
    refused = outcome["toy"]["dora"]["refused"]
    assert "1 modules have DoRA adapters" in refused
    assert "linear_fc2.adapter.weight_magnitude" in refused


@on(*BRIDGES, ULTRA_PATCHES="off")
def test_without_the_overlay_dora_is_exported_as_if_it_were_merged(outcome: dict[str, Any]) -> None:
    assert outcome["toy"]["dora"] == {"names": [f"{DOWN}.weight"]}


@on("0.6.2")
def test_autobridge_exports_every_weight_with_its_adapter(outcome: dict[str, Any]) -> None:
    auto = outcome["auto"]
    assert auto["names"]
    assert auto["adapted"] == 14, "two layers of q, k, v, o, gate, up and down"
    assert auto["worst"] < 1e-5


@on("0.6.2")
@pytest.mark.parametrize("way", ["unmerged", "tasks", "quantised", "saved"])
def test_autobridge_refuses_every_unmerged_way_out(outcome: dict[str, Any], way: str) -> None:
    refused = outcome["auto"][way]["refused"]
    assert "the adapters of 14 weights: model.layers.0." in refused
    assert refused.count(".base_layer.weight") == 5, "the first few stand for all"
    assert outcome["auto"]["files"] == []


@on("0.6.2", ULTRA_PATCHES="off")
@pytest.mark.parametrize("way", ["unmerged", "tasks", "quantised"])
def test_without_the_overlay_autobridge_exports_base_layers(outcome: dict[str, Any], way: str) -> None:
    assert sum(".base_layer." in name for name in outcome["auto"][way]["names"]) == 14


@on(*BRIDGES)
def test_experts_and_mamba_are_merged_with_their_own_adapters(outcome: dict[str, Any]) -> None:
    assert states(outcome)[MERGE] == "applied", outcome["status"][MERGE]
    assert outcome["merge"][0] == "clean", outcome["merge"]


@on(*BRIDGES, ULTRA_PATCHES="off")
def test_without_the_overlay_they_are_not(outcome: dict[str, Any]) -> None:
    assert outcome["merge"][0] == "defect"
    assert all(rank in outcome["merge"][1] for rank in WRONG[version(outcome)])


@on("0.6.2", ULTRA_PATCHES_DISABLE=MERGE)
def test_the_refusal_does_not_depend_on_the_patch_below_it(outcome: dict[str, Any]) -> None:
    assert states(outcome)[MERGE] == "disabled"
    assert outcome["merge"][0] == "defect"
    assert "refused" in outcome["toy"]["unmerged"]


@on("0.6.2", ULTRA_PATCHES_DISABLE=REFIT)
def test_the_merge_does_not_depend_on_the_refusal(outcome: dict[str, Any]) -> None:
    assert outcome["merge"][0] == "clean"
    assert outcome["toy"]["unmerged"] == {"names": [f"{DOWN}.base_layer.weight"]}


@on("0.4.2", "0.6.2")
def test_experts_of_gpt_oss_are_merged_before_they_are_transposed(outcome: dict[str, Any]) -> None:
    assert outcome["gpt-oss"] == {"names": ["model.layers.0.mlp.experts.down_proj"], "exact": True}


@on("0.6.2", ULTRA_PATCHES="off")
def test_without_the_overlay_the_adapter_is_added_to_what_was_transposed(outcome: dict[str, Any]) -> None:
    """6 x 10 against 10 x 6 is an error; GPT-OSS's own 2880 x 2880 is none."""
    assert "The size of tensor a (6) must match the size of tensor b (10)" in outcome["gpt-oss"]["error"]
