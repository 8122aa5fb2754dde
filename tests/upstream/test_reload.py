"""The two corrections of vLLM's layerwise reload, on a real MambaMixer2 of every family of releases.

Three families have a defect: up to 0.21 `conv1d.weight` is overwritten, which hides that a layer finishes early; 0.22 and
0.23 finish early; 0.24 and 0.25 only make a non-persistent buffer persistent.
"""

from typing import Any

import pytest

from tests.support import Run, states

pytestmark = pytest.mark.upstream

GUARD, VIEW = "vllm-reload-numel-guard", "vllm-mamba-conv-weights"
#: Where the code of `get_numel_loaded` is from.
OURS, THEIRS = "session.py", "meta.py"
OVERWRITTEN = ("0.18.1", "0.20.2", "0.21.0")
EARLY = ("0.22.1", "0.23.0")
LEAKING = ("0.24.0",)
FIXED = ("0.26.0", "0.28.0", "0.32.0", "0.33.0")
#: The states of GUARD and VIEW that a release needs.
NEEDED = {
    **dict.fromkeys((*OVERWRITTEN, *EARLY), ("applied", "applied")),
    **dict.fromkeys(LEAKING, ("not-needed", "applied")),
    **dict.fromkeys(FIXED, ("not-needed", "not-needed")),
}

RIGHT = {"wrong": [], "moved": [], "is view": True, "view right": True, "in state dict": False}
#: What a layer that finishes early loses: whatever comes after A and another, so nothing where A itself is the last.
LOST_EARLY = {
    "A first": ["dt_bias"],
    "A middle": ["dt_bias"],
    "A last": [],
    "conv1d first": [],
    "conv1d last": ["dt_bias"],
}
#: A statement that changes nothing, in a function that both corrections look at.
NIGHTLY = (
    "vllm/model_executor/model_loader/reload/meta.py",
    "    with CopyCounter() as counter:\n",
    "    unreleased = None\n    with CopyCounter() as counter:\n",
)


def on(*releases: str, **options: Any) -> pytest.MarkDecorator:
    """Run a test on some releases: `late`, `force` and `nightly` are settings of the run, the rest is environment."""
    arguments = ["--late"] if options.pop("late", False) else []
    for patch_id in options.pop("force", ()):
        arguments += ["--force", patch_id]
    edit = NIGHTLY if options.pop("nightly", False) else None
    # The others correct some of this as well.
    options.setdefault("ULTRA_PATCHES_ONLY", f"{GUARD},{VIEW}")
    environment = tuple(sorted(options.items()))
    runs = [
        Run("tests/upstream/reload_case.py", (("vllm", release),), tuple(arguments), environment, edit)
        for release in releases
    ]
    return pytest.mark.parametrize("outcome", runs, indirect=True, ids=str)


def sessions(outcome: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Everything that was looked at after a session, by what the session was."""
    found = {
        f"{kind}, {order}, round {number}": look
        for kind, orders in outcome["orders"].items()
        for order, rounds in orders.items()
        for number, look in enumerate(rounds, 1)
    }
    found |= {f"only the layer of {first}": look for first, look in outcome["partial"].items()}
    return {**found, "two chunks": outcome["two chunks"], "a layer of views": outcome["views only"]}


def not_right(outcome: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sessions after which something is wrong, and what."""
    differing = {
        session: {key: look[key] for key, value in RIGHT.items() if look[key] != value}
        for session, look in sessions(outcome).items()
    }
    return {session: difference for session, difference in differing.items() if difference}


def complaints(outcome: dict[str, Any]) -> list[str]:
    """The overlay's warnings about the two patches."""
    return [text for text in outcome["complaints"] if GUARD in text or VIEW in text]


def wrong_parameters(orders: dict[str, list[dict[str, Any]]]) -> dict[str, list[list[str]]]:
    """For each order the wrong parameters of every round."""
    return {order: [look["wrong"] for look in rounds] for order, rounds in orders.items()}


def twice(wrong: dict[str, list[str]]) -> dict[str, list[list[str]]]:
    """The same in both rounds."""
    return {order: [names, names] for order, names in wrong.items()}


CONV = {order: ["conv1d.weight"] for order in LOST_EARLY}
NONE: dict[str, list[str]] = {order: [] for order in LOST_EARLY}


@on(*NEEDED)
def test_everything_arrives_with_the_overlay(outcome: dict[str, Any]) -> None:
    assert len(sessions(outcome)) == 25
    assert not_right(outcome) == {}


@on(*NEEDED)
def test_the_overlay_sets_what_the_release_needs_and_no_more(outcome: dict[str, Any]) -> None:
    found = states(outcome)
    assert (found[GUARD], found[VIEW]) == NEEDED[outcome["version"]], outcome["status"]
    assert complaints(outcome) == []


@on(*NEEDED)
def test_every_binding_of_the_counter_is_replaced(outcome: dict[str, Any]) -> None:
    reload = "vllm.model_executor.model_loader.reload"
    bindings = outcome["bindings"]
    assert {f"{reload}.meta", f"{reload}.layerwise"} <= bindings.keys()
    needed = OURS if NEEDED[outcome["version"]][0] == "applied" else THEIRS
    assert set(bindings.values()) == {needed}, bindings


@on(*NEEDED)
def test_a_buffer_that_is_loaded_still_updates(outcome: dict[str, Any]) -> None:
    assert outcome["buffers"]["loaded"] == "[3.0, 3.0]"
    assert outcome["buffers"]["weight"] == "[[3.0, 3.0], [3.0, 3.0]]"


@on(*FIXED)
def test_a_buffer_that_no_loader_touches_keeps_its_value(outcome: dict[str, Any]) -> None:
    assert outcome["buffers"]["untouched"] == "[0.018798828125]"


@on(*OVERWRITTEN, ULTRA_PATCHES="off")
def test_without_the_overlay_conv1d_is_overwritten(outcome: dict[str, Any]) -> None:
    assert states(outcome)[VIEW] == "disabled"
    for orders in outcome["orders"].values():
        assert wrong_parameters(orders) == twice(CONV)
    assert outcome["partial"]["D"]["wrong"] == ["conv1d.weight"]


@on(*EARLY, ULTRA_PATCHES="off")
def test_without_the_overlay_a_layer_finishes_early(outcome: dict[str, Any]) -> None:
    assert states(outcome)[GUARD] == "disabled"
    for orders in outcome["orders"].values():
        assert wrong_parameters(orders) == twice(LOST_EARLY)
    assert outcome["partial"]["D"]["wrong"] == ["dt_bias"]


@on(*EARLY, *LEAKING, ULTRA_PATCHES="off")
def test_without_the_overlay_the_view_becomes_persistent_or_is_lost(outcome: dict[str, Any]) -> None:
    for orders in outcome["orders"].values():
        assert all(look["in state dict"] for rounds in orders.values() for look in rounds)
    assert not outcome["views only"]["is view"]


@on("0.20.2", "0.22.1", ULTRA_PATCHES_DISABLE=GUARD)
def test_the_view_is_not_corrected_without_the_guard(outcome: dict[str, Any]) -> None:
    row = outcome["status"][VIEW]
    assert (row["state"], row["reason"]) == ("disabled", f"needs {GUARD}, which is disabled")
    expected = CONV if outcome["version"] in OVERWRITTEN else LOST_EARLY
    assert wrong_parameters(outcome["orders"]["mixer"]) == twice(expected)


@on("0.21.0", ULTRA_PATCHES="off", force=[VIEW])
def test_correcting_the_view_alone_would_uncover_the_double_count(outcome: dict[str, Any]) -> None:
    for orders in outcome["orders"].values():
        assert wrong_parameters(orders) == twice(LOST_EARLY)


@on("0.21.0", "0.23.0", "0.24.0", ULTRA_PATCHES_DISABLE=VIEW)
def test_the_guard_alone_leaves_the_defect_of_the_view(outcome: dict[str, Any]) -> None:
    found = states(outcome)
    assert (found[GUARD], found[VIEW]) == (NEEDED[outcome["version"]][0], "disabled")
    expected = CONV if outcome["version"] in OVERWRITTEN else NONE
    for orders in outcome["orders"].values():
        assert wrong_parameters(orders) == twice(expected)
        assert all(look["in state dict"] for rounds in orders.values() for look in rounds)


@on("0.21.0", "0.23.0", late=True)
def test_set_late_it_reaches_the_modules_that_imported_by_name(outcome: dict[str, Any]) -> None:
    assert not_right(outcome) == {}
    assert set(outcome["bindings"].values()) == {OURS}
    assert states(outcome)[GUARD] == states(outcome)[VIEW] == "applied-late"
    # layerwise holds one by-name reference to each function but `_place_kernel_tensors`, which is its own.
    assert outcome["status"][GUARD]["rebound"] >= 1
    assert outcome["status"][VIEW]["rebound"] >= 1


@on("0.23.0", "0.28.0", nightly=True)
def test_on_a_source_of_no_release_the_probe_decides(outcome: dict[str, Any]) -> None:
    assert states(outcome)[GUARD] == NEEDED[outcome["version"]][0], outcome["status"]
    assert "probe" in outcome["status"][GUARD]["reason"]
    assert states(outcome)[VIEW] == NEEDED[outcome["version"]][1], outcome["status"]
    assert complaints(outcome) == []
    assert not_right(outcome) == {}


@on("0.23.0", nightly=True, late=True)
def test_on_a_source_of_no_release_it_is_set_late_as_well(outcome: dict[str, Any]) -> None:
    assert states(outcome)[GUARD] == states(outcome)[VIEW] == "applied-late", outcome["status"]
    assert complaints(outcome) == []
    assert not_right(outcome) == {}


@on("0.21.0", "0.23.0")
def test_reverting_the_guard_brings_back_every_binding_and_the_defect(outcome: dict[str, Any]) -> None:
    reverted = outcome["reverted"]
    assert reverted["bindings"].keys() == outcome["bindings"].keys()
    assert set(reverted["bindings"].values()) == {THEIRS}
    # The view's correction would do harm alone on 0.21, so it goes with it.
    expected = CONV if outcome["version"] in OVERWRITTEN else LOST_EARLY
    assert wrong_parameters(reverted["orders"]) == twice(expected)
