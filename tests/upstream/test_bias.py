"""The router's expert bias through every wrap of Megatron-Core and Megatron-Bridge, on core's own TopKRouter.

A trained bias of 512 values around 40.1 has about 360 distinct ones in fp32 and a single one in bf16 or fp16. fp32 again
after the wrap means nothing: core relabels what was rounded. So everything here is compared bit by bit.
"""

from typing import Any

import pytest

from tests.support import Run, states

pytestmark = pytest.mark.upstream

FLOAT16, BUILDER = "megatron-router-bias-fp32", "megatron-router-bias-builder"
GET_MODEL, UNIMODAL, EXPORT = "bridge-router-bias-get-model", "bridge-router-bias-unimodal", "bridge-router-bias-export"

#: The model builder came with 0.18.
CORES = {"0.16.1": ("core",), "0.17.1": ("core",), "0.18.2": ("core", "builder"), "0.19.2": ("core", "builder")}
BUILDERS = ("0.18.2", "0.19.2")
#: Each Bridge with a core it was released for.
BRIDGES = {"0.3.1": "0.16.1", "0.4.2": "0.17.1", "0.6.2": "0.19.2"}
#: What a wrap leaves of the bias, from the wrap itself to the checkpoint.
STAGES = ("wrapped", "maintained", "state dict")


def parametrize(runs: list[Run]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("outcome", runs, indirect=True, ids=str)


def on_core(*versions: str, **environment: str) -> pytest.MarkDecorator:
    """Run a test on releases of Megatron-Core."""
    return parametrize(
        [
            Run("tests/upstream/bias_case.py", (("megatron-core", v),), CORES[v], tuple(environment.items()))
            for v in versions
        ]
    )


def on_bridge(*versions: str, case: str = "bias_case.py", **environment: str) -> pytest.MarkDecorator:
    """Run a test on releases of Megatron-Bridge, each with its core."""
    arguments = ("bridge",) if case == "bias_case.py" else ()
    trees = [(("megatron-bridge", v), ("megatron-core", BRIDGES[v])) for v in versions]
    return parametrize([Run(f"tests/upstream/{case}", t, arguments, tuple(environment.items())) for t in trees])


def assert_exact(seen: dict[str, Any]) -> None:
    """The bias is what was loaded, at every stage, and everything else was converted."""
    assert [stage for stage in STAGES if not seen[stage]["exact"]] == [], seen
    assert seen["weight"] in ("bfloat16", "float16")


def assert_rounded(seen: dict[str, Any]) -> None:
    """Nothing is left of the differences between experts, and the dtype in the end does not tell."""
    assert [seen[stage]["distinct"] for stage in STAGES] == [1, 1, 1], seen
    assert seen["state dict"]["dtype"] == "float32"


def paths(outcome: dict[str, Any], part: str, *starts: str, wrapper: str) -> list[dict[str, Any]]:
    """What was seen on the paths of a part that start with one of some words and use a wrapper; there must be some."""
    found = [
        seen
        for path, seen in outcome[part].items()
        if path.split(", ")[0] in starts and path.split(", ")[1:2] == [wrapper]
    ]
    assert len(found) == 2, list(outcome[part])
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_core(*CORES)
def test_float16module_keeps_the_bias(outcome: dict[str, Any], precision: str) -> None:
    assert states(outcome)[FLOAT16] == "applied", outcome["status"][FLOAT16]
    assert_exact(outcome["core"][precision])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_core(*CORES, ULTRA_PATCHES="off")
def test_without_the_overlay_float16module_rounds_the_bias(outcome: dict[str, Any], precision: str) -> None:
    assert_rounded(outcome["core"][precision])


@on_core("0.19.2")
def test_the_bias_of_quantile_balancing_is_kept_as_well(outcome: dict[str, Any]) -> None:
    assert_exact(outcome["core"]["qb_beta"])
    assert outcome["core"]["qb_beta_accum"]["exact"]


@on_core("0.19.2", ULTRA_PATCHES="off")
def test_without_the_overlay_the_bias_of_quantile_balancing_is_rounded(outcome: dict[str, Any]) -> None:
    assert_rounded(outcome["core"]["qb_beta"])
    assert outcome["core"]["qb_beta_accum"]["distinct"] == 1


@pytest.mark.parametrize("arriving", ["fresh", "trained"])
@on_core(*CORES)
def test_a_bias_that_is_not_rounded_passes_without_a_word(outcome: dict[str, Any], arriving: str) -> None:
    assert outcome["core"][arriving] == {"unchanged": True, "complaints": []}


@pytest.mark.parametrize(
    ("arriving", "described"), [("rounded", "bfloat16"), ("relabelled", "float32 with values of bfloat16")]
)
@on_core(*CORES)
def test_a_bias_that_arrives_rounded_is_named_and_not_changed(
    outcome: dict[str, Any], arriving: str, described: str
) -> None:
    seen = outcome["core"][arriving]
    assert seen["unchanged"]
    (complaint,) = seen["complaints"]
    assert f"router.expert_bias arrives already rounded: {described}, 1 distinct values for 512 experts" in complaint


@on_core(*CORES, ULTRA_PATCHES="off")
def test_without_the_overlay_nobody_is_told(outcome: dict[str, Any]) -> None:
    assert not outcome["core"]["trained"]["unchanged"]
    assert [outcome["core"][arriving]["complaints"] for arriving in ("trained", "rounded", "relabelled")] == [
        [],
        [],
        [],
    ]


@on_core(*CORES)
def test_a_checkpoint_loaded_after_the_wrap_arrives(outcome: dict[str, Any]) -> None:
    assert outcome["core"]["loaded after the wrap"]["exact"]


@on_core("0.16.1", "0.17.1")
def test_a_core_without_the_builder_needs_no_patch_for_it(outcome: dict[str, Any]) -> None:
    assert states(outcome)[BUILDER] == "not-needed", outcome["status"][BUILDER]


@pytest.mark.parametrize("wrapper", ["Float16Module", "own"])
@on_core(*BUILDERS)
def test_the_model_builder_keeps_the_bias(outcome: dict[str, Any], wrapper: str) -> None:
    assert states(outcome)[BUILDER] == "applied", outcome["status"][BUILDER]
    for seen in paths(outcome, "builder", "wrap", "build", wrapper=wrapper):
        assert_exact(seen)


@on_core(*BUILDERS)
def test_the_model_builder_keeps_the_bias_from_a_wrapper_that_converts_in_place(outcome: dict[str, Any]) -> None:
    for seen in paths(outcome, "builder", "wrap", "build", wrapper="own in place"):
        assert_exact(seen)


@on_core(*BUILDERS)
def test_the_model_builder_names_a_bias_that_arrives_rounded(outcome: dict[str, Any]) -> None:
    complaints = set(outcome["builder"]["complaints"])
    assert len(complaints) == 1
    assert "router.expert_bias arrives already rounded" in complaints.pop()


@pytest.mark.parametrize("wrapper", ["Float16Module", "own", "own in place"])
@on_core(*BUILDERS, ULTRA_PATCHES="off")
def test_without_the_overlay_the_model_builder_rounds_the_bias(outcome: dict[str, Any], wrapper: str) -> None:
    for seen in paths(outcome, "builder", "wrap", "build", wrapper=wrapper):
        assert_rounded(seen)


@on_core("0.19.2", ULTRA_PATCHES_DISABLE=BUILDER)
def test_the_patch_of_float16module_does_not_reach_other_wrappers(outcome: dict[str, Any]) -> None:
    for seen in paths(outcome, "builder", "wrap", "build", wrapper="Float16Module"):
        assert_exact(seen)
    for seen in paths(outcome, "builder", "wrap", "build", wrapper="own"):
        assert_rounded(seen)


@on_core("0.19.2", ULTRA_PATCHES_DISABLE=FLOAT16)
def test_the_patch_of_the_builder_does_not_reach_a_bare_float16module(outcome: dict[str, Any]) -> None:
    for seen in paths(outcome, "builder", "wrap", "build", wrapper="Float16Module"):
        assert_exact(seen)
    assert_rounded(outcome["core"]["bf16"])


@pytest.mark.parametrize("wrapper", ["Float16Module", "own"])
@on_bridge(*BRIDGES)
def test_a_provider_that_loads_before_the_wrap_keeps_the_bias(outcome: dict[str, Any], wrapper: str) -> None:
    for seen in paths(outcome, "bridge", "provide", wrapper=wrapper):
        assert_exact(seen)


@on_bridge(*BRIDGES)
def test_a_provider_keeps_the_bias_from_a_wrapper_that_converts_in_place(outcome: dict[str, Any]) -> None:
    for seen in paths(outcome, "bridge", "provide", wrapper="own in place"):
        assert_exact(seen)


@pytest.mark.parametrize("wrapper", ["Float16Module", "own"])
@on_bridge("0.3.1", ULTRA_PATCHES="off")
def test_without_the_overlay_a_provider_rounds_the_bias(outcome: dict[str, Any], wrapper: str) -> None:
    for seen in paths(outcome, "bridge", "provide", wrapper=wrapper):
        assert_rounded(seen)


@on_bridge("0.3.1", ULTRA_PATCHES_DISABLE=GET_MODEL)
def test_a_provider_with_another_wrapper_needs_the_patch_of_get_model(outcome: dict[str, Any]) -> None:
    for seen in paths(outcome, "bridge", "provide", wrapper="own"):
        assert_rounded(seen)


@pytest.mark.parametrize("wrapper", ["Float16Module", "own"])
@on_bridge("0.4.2", "0.6.2")
def test_the_builder_of_bridge_keeps_the_bias(outcome: dict[str, Any], wrapper: str) -> None:
    for seen in paths(outcome, "bridge", "wrap", "build", wrapper=wrapper):
        assert_exact(seen)


@pytest.mark.parametrize("wrapper", ["Float16Module", "own"])
@on_bridge("0.4.2", "0.6.2", ULTRA_PATCHES="off")
def test_without_the_overlay_the_builder_of_bridge_rounds_the_bias(outcome: dict[str, Any], wrapper: str) -> None:
    for seen in paths(outcome, "bridge", "wrap", "build", wrapper=wrapper):
        assert_rounded(seen)


@on_bridge("0.4.2", ULTRA_PATCHES_DISABLE=UNIMODAL)
def test_another_wrapper_in_the_builder_of_bridge_needs_its_patch(outcome: dict[str, Any]) -> None:
    for seen in paths(outcome, "bridge", "wrap", "build", wrapper="own"):
        assert_rounded(seen)


@on_bridge(*BRIDGES)
def test_the_overlay_sets_what_the_bridge_needs_and_no_more(outcome: dict[str, Any]) -> None:
    found = states(outcome)
    needed = {"0.3.1": ("applied", "not-needed"), "0.4.2": ("not-needed", "applied")}
    expected = needed.get(outcome["status"][GET_MODEL]["version"], ("not-needed", "not-needed"))
    assert (found[GET_MODEL], found[UNIMODAL]) == expected, outcome["status"]


@pytest.mark.parametrize("dtype", ["None", "bfloat16"])
@on_bridge("0.6.2", case="round_trip_case.py")
def test_a_checkpoint_comes_back_from_megatron_bit_by_bit(outcome: dict[str, Any], dtype: str) -> None:
    assert states(outcome)[EXPORT] == "applied", outcome["status"][EXPORT]
    export = outcome["exports"][dtype]
    assert (export["names"], export["other names"], export["changed"]) == (3115, [], [])
    assert len(export["biases"]) == 2
    assert all(bias["exact"] for bias in export["biases"].values()), export["biases"]


@on_bridge("0.6.2", case="round_trip_case.py", ULTRA_PATCHES="off")
def test_without_the_overlay_an_export_in_bf16_rounds_the_biases_alone(outcome: dict[str, Any]) -> None:
    export = outcome["exports"]["bfloat16"]
    assert export["changed"] == list(export["biases"])
    assert [bias["distinct"] for bias in export["biases"].values()] == [1, 1]


@pytest.mark.parametrize("dtype", ["None", "bfloat16"])
@on_bridge("0.6.2", case="round_trip_case.py")
def test_the_check_of_exported_names_misses_no_router(outcome: dict[str, Any], dtype: str) -> None:
    export = outcome["exports"][dtype]
    assert export["check"] is None
    assert "2 of 2 routers" in export["check without the biases"]
    assert (
        "1 of 2 routers are exported without their expert bias: model.layers.1.mlp.gate"
        in (export["check without one bias"])
    )
