"""What a model writes past its weight loaders: taken as a plain load takes it, or refused by name with the old weights back."""

from typing import Any

import pytest

from tests.support import Run

pytestmark = pytest.mark.upstream
RELEASES = ("0.16.0", "0.22.1", "0.26.0", "0.33.0")
PATCH = "vllm-reload-direct-writes"
OLD, NEW = [0.0] * 4, [2.0] * 4


def case(release: str, **environment: str) -> Run:
    return Run("tests/upstream/direct_case.py", (("vllm", release),), (), tuple(environment.items()))


on = pytest.mark.parametrize("outcome", [case(release) for release in RELEASES], indirect=True, ids=str)


@on
@pytest.mark.parametrize("way", ["other_dtype", "bytes", "slices", "added", "own_part"])
def test_it_arrives(outcome: dict[str, Any], way: str) -> None:
    seen = outcome["taken"][way]
    assert (seen["said"], seen["left"]) == (None, False)
    assert seen["values"] == {"layer.weight": NEW, "layer.bias_like": NEW}


@on
@pytest.mark.parametrize(
    ("way", "kind", "said"),
    [
        ("set", "DirectWriteError", "layer.weight is written by aten::set_"),
        ("several", "DirectWriteError", "layer.weight is written by aten::_foreach_copy_"),
        (
            "another",
            "DirectWriteError",
            "layer.weight had the shape (4,) and the model's load_weights puts a tensor of (8,)",
        ),
        ("computed", "RuntimeError", "meta"),
        ("outside", "RuntimeError", "exceeds dimension size"),
        ("other_shape", "RuntimeError", "must match the size"),
        ("other_memory", "RuntimeError", "incompatible tensor type"),
        ("raises", "KeyError", "no such expert"),
    ],
)
def test_what_cannot_be_done_later_fails_and_the_old_weights_are_back(
    outcome: dict[str, Any], way: str, kind: str, said: str
) -> None:
    seen = outcome["refused"][way]
    assert seen["said"][0] == kind
    assert said in seen["said"][1]
    assert seen["values"] == {"layer.weight": OLD, "layer.bias_like": OLD}
    assert not seen["left"], "load_weights is the model's own again"


@on
def test_no_model_is_kept_alive_by_a_session_that_nobody_ended(outcome: dict[str, Any]) -> None:
    assert outcome["left over"] == 0


@pytest.mark.parametrize("outcome", [case("0.33.0", ULTRA_PATCHES_DISABLE=PATCH)], indirect=True, ids=str)
def test_without_the_patch_it_is_lost_in_silence(outcome: dict[str, Any]) -> None:
    for way in ("other_dtype", "bytes", "added", "own_part"):
        assert outcome["taken"][way]["said"] is None
        assert outcome["taken"][way]["values"] == {"layer.weight": OLD, "layer.bias_like": NEW}
    assert outcome["refused"]["several"]["said"] is None


GPT_OSS = "tests/upstream/gpt_oss_case.py"


@pytest.mark.parametrize("outcome", [Run(GPT_OSS, ())], indirect=True, ids=str)
@pytest.mark.parametrize("update", ["whole", "chunks", "reversed", "twice", "back", "sinks and norms"])
def test_gpt_oss_is_what_a_fresh_model_is(outcome: dict[str, Any], update: str) -> None:
    assert outcome["status"][PATCH]["state"] == "applied"
    assert outcome["wrong"][update] == []
    assert outcome["tensors"] >= 29


@pytest.mark.parametrize("outcome", [Run(GPT_OSS, (), (), (("ULTRA_PATCHES_DISABLE", PATCH),))], indirect=True, ids=str)
def test_without_the_patch_gpt_oss_keeps_its_old_experts_and_sinks(outcome: dict[str, Any]) -> None:
    assert len(outcome["wrong"]["whole"]) == 10
    assert {name.rpartition(".")[2] for name in outcome["wrong"]["whole"]} >= {"sinks", "w13_weight", "w2_weight"}
