"""Weight-update sessions of any form, on toy layers and on vLLM's own, on every family of releases.

`sessions_case.py` draws models, orders, chunks, repetitions and omissions and compares with plain loading; `layers_case.py` does
it with the layers of real models; `endings_case.py` ends sessions in every way and looks at what is left.
"""

from typing import Any

import pytest

from tests.support import Run, states

pytestmark = pytest.mark.upstream

#: One release of each family of reload functions, the oldest and the newest among them.
FAMILIES = ("0.16.0", "0.19.1", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.26.0", "0.28.0", "0.31.0", "0.33.0")
NEWEST = "0.33.0"
RELOAD = {
    f"vllm-reload-{name}"
    for name in (
        "abandoned-session", "direct-writes", "duplicate-weights", "keep-unsent", "late-parameters", "live-write",
        "receive-buffer",
    )
}  # fmt: skip


def drawn(release: str, examples: int = 300, **environment: str) -> Run:
    arguments = ("--examples", str(examples))
    return Run("tests/upstream/sessions_case.py", (("vllm", release),), arguments, tuple(environment.items()))


def layers(*releases: str) -> list[Run]:
    return [Run("tests/upstream/layers_case.py", (("vllm", release),)) for release in releases]


COMPILED = Run("tests/upstream/layers_case.py", (), ("--compiled",))
each = pytest.mark.parametrize


@each("outcome", [drawn(release) for release in FAMILIES], indirect=True, ids=str)
def test_every_session_leaves_what_plain_loading_leaves(outcome: dict[str, Any]) -> None:
    assert outcome["failure"] is None
    assert outcome["examples"] >= 300


@each("outcome", [drawn(release) for release in FAMILIES], indirect=True, ids=str)
def test_sessions_of_several_models_and_of_a_part_of_one(outcome: dict[str, Any]) -> None:
    assert set(outcome["roots"]) == {"a leaf", "two leaves", "two with a layer", "experts alone"}
    wrong = {
        title: models
        for title, models in outcome["roots"].items()
        if any(value != [2.0, 2.0] for model in models for value in model.values())
    }
    assert wrong == {}


@each("outcome", [drawn(NEWEST, ULTRA_PATCHES_DISABLE=patch_id) for patch_id in sorted(RELOAD)], indirect=True, ids=str)
def test_without_one_patch_a_session_is_found_that_goes_wrong(outcome: dict[str, Any]) -> None:
    found = states(outcome)
    assert [patch_id for patch_id in RELOAD if found[patch_id] == "disabled"] != []
    assert sum(found[patch_id] == "applied" for patch_id in RELOAD) == len(RELOAD) - 1, "the others stay"
    assert outcome["failure"] is not None


@each("outcome", [drawn(r, ULTRA_PATCHES="off") for r in ("0.16.0", NEWEST)], indirect=True, ids=str)
def test_without_the_overlay_a_session_is_found_that_goes_wrong(outcome: dict[str, Any]) -> None:
    assert outcome["failure"] is not None


@each("outcome", [*layers("0.16.0", "0.22.1", "0.26.0", NEWEST), COMPILED], indirect=True, ids=str)
def test_layers_of_real_models_are_as_plain_loading_leaves_them(outcome: dict[str, Any]) -> None:
    for kind, seen in outcome["kinds"].items():
        assert seen["wrong"] == {}, kind
        assert seen["plans"] >= 7


@each("outcome", layers("0.16.0", "0.22.1", "0.26.0", NEWEST), indirect=True, ids=str)
def test_what_is_not_repacked_is_never_refused(outcome: dict[str, Any]) -> None:
    assert {kind: seen["refused"] for kind, seen in outcome["kinds"].items()} == {kind: {} for kind in outcome["kinds"]}


@each("outcome", [COMPILED], indirect=True, ids=str)
@each("kind", ["packed qkv", "packed experts", "int8"])
def test_a_part_of_a_repacked_layer_is_refused_and_named(outcome: dict[str, Any], kind: str) -> None:
    """Where the layer is as it was is part of `wrong`; a session that carries the layer whole is not refused."""
    refused = outcome["kinds"][kind]["refused"]
    assert refused
    assert not {"whole", "reversed", "one call each", "twice", "begun again"} & refused.keys()
    for message in refused.values():
        assert "the session does not carry" in message
        assert "Send everything of this layer in one session" in message
        assert any(name in message for name in ("qkv", "gate_up", "experts"))


ENDINGS = [
    Run("tests/upstream/endings_case.py", (("vllm", release),)) for release in ("0.16.0", "0.21.0", "0.26.0", NEWEST)
]
endings = each("outcome", ENDINGS, indirect=True, ids=str)


@endings
def test_a_router_bias_of_an_earlier_session_does_not_come_back(outcome: dict[str, Any]) -> None:
    """Up to 0.19 the bias is a parameter like others, which a failed session leaves without memory until the next."""
    assert outcome["bias of a failed session"] == [2, [0.0, 0.0]]
    assert outcome["bias that was set in between"] == [3, [5.0, 5.0]]


@endings
def test_parts_that_overlap_count_once(outcome: dict[str, Any]) -> None:
    assert outcome["parts that overlap"] == [[3.0] * 3 + [2.0] * 3 + [1.0] * 2, [2.0] * 3]


@endings
@each("way", ["end", "worker", "interrupted"])
def test_a_failed_session_of_one_model_leaves_the_open_one_of_another(outcome: dict[str, Any], way: str) -> None:
    seen = outcome["two models"][way]
    assert seen["raised"] == ("KeyboardInterrupt" if way == "interrupted" else "RuntimeError")
    assert set(map(tuple, seen["open"].values())) == {(3.0, 3.0)}
    assert seen["failed"]["other.w"] == [0.0, 0.0], "its old weights"


@endings
@each("way", ["finished", "failed", "interrupted", "begun again", "reverted"])
def test_nothing_is_left_of_a_session_however_it_ended(outcome: dict[str, Any], way: str) -> None:
    seen = outcome["left"][way]
    assert seen["during"] > 0
    assert seen["after"] == 0
