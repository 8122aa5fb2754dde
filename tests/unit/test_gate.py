"""Every decision of the gate and what it says, from evidence made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ultra_patches.core.facts import Upstream
from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.core.gate import Action, Decision, Evidence, State, decide, decide_all
from ultra_patches.core.lock import Lock
from ultra_patches.core.settings import Settings
from ultra_patches.patch import Patch, Target, Variant, Verdict

from .stub import correct, declare

KEY = "vllm.meta:f"
OLD, FIXED, NEW = "old digest", "fixed digest", "a digest that no release has"


def lock(**verdicts: str) -> Lock:
    """0.20.0 and 0.23.0 carry the old source, 0.24.0 the fixed one."""
    return Lock(
        functions={"vllm": {KEY: {OLD: ("0.20.0", "0.23.0"), FIXED: ("0.24.0",)}}},
        signatures={"vllm": {OLD: "(a)", FIXED: "(a)"}},
        verdicts={"toy": verdicts or {"0.20.0": "affected", "0.23.0": "affected", "0.24.0": "unaffected"}},
    )


def patch(**fields: object) -> Patch:
    return declare("toy", ("vllm.meta", "f"), **fields)


def upstream(version: str | None = "0.20.0") -> Upstream:
    return Upstream("vllm", "vllm", Path("/nowhere/vllm"), version, "vllm", version)


def sources(digest: str, signature: str = "(a)", key: str = KEY) -> Mapping[str, Fingerprint]:
    return {key: Fingerprint(digest, signature, False)}


def evidence(digest: str, version: str | None = "0.20.0", **more: object) -> Evidence:
    return Evidence(upstream(version), sources(digest), **more)  # type: ignore[arg-type]


def outcome(decision: Decision) -> tuple[Action, State]:
    return decision.action, decision.state


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(mode="off"), "ULTRA_PATCHES=off"),
        (Settings(disable=frozenset({"toy"})), "listed in ULTRA_PATCHES_DISABLE"),
        (Settings(only=frozenset({"other"})), "not listed in ULTRA_PATCHES_ONLY"),
    ],
)
def test_disabled(settings: Settings, reason: str) -> None:
    assert decide(patch(), evidence(OLD), lock(), settings) == Decision(Action.NOTHING, State.DISABLED, reason)


def test_not_installed() -> None:
    decision = decide(patch(), Evidence(None, {}), lock(), Settings())
    assert decision == Decision(Action.NOTHING, State.NOT_INSTALLED, "vllm is not installed")


def test_known_to_be_affected() -> None:
    toy = patch()
    decision = decide(toy, evidence(OLD), lock(), Settings())
    assert outcome(decision) == (Action.APPLY, State.ARMED)
    assert decision.variant is toy.variants[0]
    assert decision.reason == "same source as in 0.20.0 to 0.23.0, which are affected"


def test_one_release_is_named_alone() -> None:
    known = Lock({"vllm": {KEY: {OLD: ("0.20.0",)}}}, {}, {"toy": {"0.20.0": "affected"}})
    assert decide(patch(), evidence(OLD), known, Settings()).reason == "same source as in 0.20.0, which is affected"


def test_known_to_be_fixed_is_left_alone() -> None:
    decision = decide(patch(fixed_in="0.24.0"), evidence(FIXED, "0.24.0"), lock(), Settings())
    assert decision == Decision(Action.NOTHING, State.NOT_NEEDED, "fixed upstream since 0.24.0")


def test_the_lock_says_since_when_it_is_fixed() -> None:
    functions = {"vllm": {KEY: {OLD: ("0.9.0",), FIXED: ("0.10.0", "0.11.0")}}}
    known = Lock(functions, {}, {"toy": {"0.11.0": "unaffected", "0.10.0": "unaffected", "0.9.0": "affected"}})
    assert decide(patch(), evidence(FIXED, "0.11.0"), known, Settings()).reason == "fixed upstream since 0.10.0"


def test_never_affected() -> None:
    known = lock(**{"0.20.0": "unaffected", "0.23.0": "unaffected"})
    decision = decide(patch(fixed_in="0.24.0"), evidence(OLD), known, Settings())
    assert decision == Decision(Action.NOTHING, State.NOT_NEEDED, "never affected: same source as in 0.20.0")


@pytest.mark.parametrize(
    ("release", "fixed_in", "reason"),
    [
        ("0.10.0", "0.4.1", "fixed upstream since 0.4.1"),
        ("0.4.1", "0.10.0", "never affected: same source as in 0.4.1"),
        ("0.24.0rc1", "0.24.0", "never affected: same source as in 0.24.0rc1"),
    ],
)
def test_releases_are_compared_as_versions(release: str, fixed_in: str, reason: str) -> None:
    known = Lock({"vllm": {KEY: {OLD: (release,)}}}, {}, {"toy": {release: "unaffected"}})
    assert decide(patch(fixed_in=fixed_in), evidence(OLD), known, Settings()).reason == reason


def test_an_unknown_source_is_drifted_and_the_next_step_named() -> None:
    decision = decide(patch(), evidence(NEW, "0.26.0"), lock(), Settings())
    assert outcome(decision) == (Action.NOTHING, State.DRIFTED)
    assert "vllm 0.26.0" in decision.reason
    assert "run `ultra-patches verify toy`" in decision.reason


def test_an_unknown_source_is_probed_where_the_probe_can_run() -> None:
    decision = decide(patch(probe_after=("vllm.meta",)), evidence(NEW), lock(), Settings())
    assert outcome(decision) == (Action.PROBE, State.ARMED)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict.DEFECT, (Action.APPLY, State.ARMED)),
        (Verdict.CLEAN, (Action.NOTHING, State.NOT_NEEDED)),
        (Verdict.INCONCLUSIVE, (Action.NOTHING, State.DRIFTED)),
    ],
)
def test_the_verdict_of_verify_decides_on_an_unknown_source(verdict: Verdict, expected: tuple[Action, State]) -> None:
    assert outcome(decide(patch(), evidence(NEW, remembered=verdict), lock(), Settings())) == expected


@pytest.mark.parametrize("verdict", list(Verdict))
def test_what_was_measured_goes_before_the_verdict_of_verify(verdict: Verdict) -> None:
    affected = decide(patch(), evidence(OLD, remembered=verdict), lock(), Settings())
    fixed = decide(patch(), evidence(FIXED, remembered=verdict), lock(), Settings())
    assert (affected.action, fixed.state) == (Action.APPLY, State.NOT_NEEDED)


@pytest.mark.parametrize("remembered", [None, Verdict.DEFECT])
def test_a_changed_signature_is_drifted(remembered: Verdict | None) -> None:
    given = Evidence(upstream(), sources(NEW, "(a, b)"), remembered)
    decision = decide(patch(probe_after=("vllm.meta",)), given, lock(), Settings())
    assert outcome(decision) == (Action.NOTHING, State.DRIFTED)
    assert "vllm.meta:f(a, b)" in decision.reason


def test_a_target_that_is_gone_is_drifted_and_named() -> None:
    decision = decide(patch(), Evidence(upstream(), {}), lock(), Settings())
    assert outcome(decision) == (Action.NOTHING, State.DRIFTED)
    assert KEY in decision.reason
    assert "ultra-patches explain toy" in decision.reason


def test_a_release_that_never_had_the_target_is_known() -> None:
    known = Lock({"vllm": {KEY: {"": ("0.15.0",)}}}, {}, {"toy": {"0.15.0": "unaffected"}})
    decision = decide(patch(), Evidence(upstream(), {}), known, Settings())
    assert outcome(decision) == (Action.NOTHING, State.NOT_NEEDED)


def test_no_version_is_said_to_be_unknown() -> None:
    assert "vllm of unknown version" in decide(patch(), evidence(NEW, None), lock(), Settings()).reason


def decide_pair(user: str, base: str, *, disabled: bool = False, reached: State | None = None) -> dict[str, Decision]:
    """Decide on `toy`, probed where its source is unknown, and `base`, which it needs and which is disabled or has `reached`."""
    chosen = Settings(disable=frozenset({"base"} if disabled else ()))
    known = {"base": reached} if reached else {}
    patches = {
        "toy": patch(requires=("base",), probe_after=("vllm.meta",)),
        "base": declare("base", ("vllm.meta", "f")),
    }
    measured = lock()
    both = Lock(measured.functions, measured.signatures, {**measured.verdicts, "base": measured.verdicts["toy"]})
    return decide_all(patches, {"toy": evidence(user), "base": evidence(base)}, both, chosen, known)


@pytest.mark.parametrize("digest", [OLD, NEW])
@pytest.mark.parametrize("state", [State.FAILED, State.CONFLICT, State.DRIFTED, State.REVERTED])
def test_a_patch_that_needs_another_is_not_set_where_that_one_is_not_in_force(digest: str, state: State) -> None:
    decision = decide_pair(digest, OLD, reached=state)["toy"]
    blocked = (state, f"needs base, which is {state.value}")
    assert decision == Decision(Action.NOTHING, *blocked, blocked=blocked)


@pytest.mark.parametrize("base", [OLD, FIXED])
def test_a_patch_whose_need_is_armed_or_not_needed_is_set(base: str) -> None:
    assert decide_pair(OLD, base)["toy"].action is Action.APPLY


@pytest.mark.parametrize("state", [State.APPLIED, State.APPLIED_LATE, State.NOT_NEEDED])
def test_what_became_of_a_need_counts_before_what_would_be_decided(state: State) -> None:
    assert decide_pair(OLD, NEW)["toy"].state is State.DRIFTED
    assert decide_pair(OLD, NEW, reached=state)["toy"].action is Action.APPLY


def test_a_patch_that_is_not_needed_needs_no_other() -> None:
    decision = decide_pair(FIXED, OLD, reached=State.FAILED)["toy"]
    assert decision.state is State.NOT_NEEDED
    assert decision.blocked == (State.FAILED, "needs base, which is failed")


@pytest.mark.parametrize(("base", "state"), [(OLD, State.DISABLED), (NEW, State.DISABLED), (FIXED, State.ARMED)])
def test_a_disabled_need_blocks_unless_it_would_not_be_set_anyway(base: str, state: State) -> None:
    assert decide_pair(OLD, base, disabled=True)["toy"].state is state


def test_a_need_that_is_not_declared_is_named() -> None:
    decision = decide_all({"toy": patch(requires=("base",))}, {"toy": evidence(OLD)}, lock(), Settings())["toy"]
    assert (decision.state, decision.reason) == (State.DRIFTED, "needs base, which is not declared")


def test_patches_that_need_each_other_are_drifted() -> None:
    circle = {"toy": patch(requires=("b",)), "b": declare("b", ("vllm.meta", "f"), requires=("toy",))}
    known = Lock(lock().functions, lock().signatures, {**lock().verdicts, "b": lock().verdicts["toy"]})
    both = decide_all(circle, {"toy": evidence(OLD), "b": evidence(OLD)}, known, Settings())
    assert {name: (d.state, d.reason) for name, d in both.items()} == {
        "toy": (State.DRIFTED, "needs b, which is drifted"),
        "b": (State.DRIFTED, "needs toy, which needs it in turn"),
    }
    itself = decide_all({"toy": patch(requires=("toy",))}, {"toy": evidence(OLD)}, lock(), Settings())["toy"]
    assert (itself.state, itself.reason) == (State.DRIFTED, "needs toy, which needs it in turn")


def test_a_watched_function_that_changed_makes_the_source_unknown() -> None:
    watching = patch(watches=("vllm.meta:SKIP",))
    known = Lock(
        {"vllm": {KEY: {OLD: ("0.20.0",)}, "vllm.meta:SKIP": {"one": ("0.20.0",)}}},
        {},
        {"toy": {"0.20.0": "affected"}},
    )
    same = {**sources(OLD), **sources("one", "()", "vllm.meta:SKIP")}
    changed = {**sources(OLD), **sources("two", "()", "vllm.meta:SKIP")}
    assert decide(watching, Evidence(upstream(), same), known, Settings()).action is Action.APPLY
    assert decide(watching, Evidence(upstream(), changed), known, Settings()).state is State.DRIFTED
    assert decide(watching, Evidence(upstream(), sources(OLD)), known, Settings()).state is State.DRIFTED


def test_the_first_variant_whose_targets_exist_is_set() -> None:
    new = Variant("new", (Target("vllm.meta", "f", correct), Target("vllm.meta", "g", correct)))
    old = Variant("old", (Target("vllm.meta", "f", correct),))
    known = Lock(
        {"vllm": {KEY: {OLD: ("0.20.0", "0.27.0")}, "vllm.meta:g": {"": ("0.20.0",), "g": ("0.27.0",)}}},
        {},
        {"toy": {"0.20.0": "affected", "0.27.0": "affected"}},
    )
    toy = patch(variants=(new, old))
    both = {**sources(OLD), **sources("g", "()", "vllm.meta:g")}
    assert decide(toy, Evidence(upstream(), both), known, Settings()).variant is new
    assert decide(toy, Evidence(upstream(), sources(OLD)), known, Settings()).variant is old


@pytest.mark.parametrize("second", ["unaffected", None])
def test_releases_that_disagree_or_were_not_measured_decide_nothing(second: str | None) -> None:
    verdicts = {"0.20.0": "affected", **({"0.23.0": second} if second else {})}
    decision = decide(patch(), evidence(OLD), lock(**verdicts), Settings())
    assert decision.state is State.DRIFTED


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.20.0", State.NOT_NEEDED),
        ("0.21.0", State.NOT_NEEDED),
        ("0.40.0", State.DRIFTED),
        ("0.1.dev493+g1", State.DRIFTED),
        ("dev", State.DRIFTED),
        (None, State.DRIFTED),
    ],
)
def test_absence_counts_only_where_releases_had_no_such_function(version: str | None, state: State) -> None:
    early = Lock(
        {"vllm": {KEY: {"": ("0.20.0", "0.21.0"), OLD: ("0.23.0", "0.24.0")}}},
        {"vllm": {OLD: "(a)"}},
        {"toy": {"0.20.0": "unaffected", "0.21.0": "unaffected", "0.23.0": "affected", "0.24.0": "affected"}},
    )
    decision = decide(patch(), Evidence(upstream(version), {}), early, Settings())
    assert outcome(decision) == (Action.NOTHING, state)


@pytest.mark.parametrize("version", ["0.40.0", "dev"])
def test_absence_counts_where_the_newest_release_has_none_either(version: str) -> None:
    gone = Lock(
        {"vllm": {KEY: {OLD: ("0.20.0",), "": ("0.24.0",)}}},
        {"vllm": {OLD: "(a)"}},
        {"toy": {"0.20.0": "affected", "0.24.0": "unaffected"}},
    )
    decision = decide(patch(), Evidence(upstream(version), {}), gone, Settings())
    assert outcome(decision) == (Action.NOTHING, State.NOT_NEEDED)
