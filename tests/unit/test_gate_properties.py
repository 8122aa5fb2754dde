"""What holds of the gate for any evidence: it never claims, never acts against a wish, never goes by the version."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.core.facts import Upstream
from ultra_patches.core.fingerprint import Fingerprint
from ultra_patches.core.gate import BAD, Action, Decision, Evidence, State, decide, decide_all
from ultra_patches.core.lock import Lock
from ultra_patches.core.settings import Settings
from ultra_patches.patch import Patch, Target, Variant, Verdict

from .stub import correct, declare
from .test_gate import FIXED, KEY, NEW, OLD, lock, sources, upstream

KEYS = ("vllm.meta:f", "vllm.meta:g", "vllm.layerwise:h")
RELEASES = ("0.18.0", "0.20.0", "0.24.0")
DIGESTS = ("", "one", "two", "three")
VERSIONS = st.one_of(
    st.none(),
    st.sampled_from(
        ["0.20.0", "0.24.0rc1", "0.24.0.dev12+g1", "0.1.dev493+g2", "dev", "", "0.23.0-nv25.09", "0.24.0_ascend"]
    ),
    st.text(max_size=8),
)


def variant(keys: list[str]) -> Variant:
    return Variant("+".join(keys), tuple(Target(*key.split(":"), correct) for key in keys))


PATCHES = st.builds(
    lambda variants, watches, after, fixed: declare(
        "toy", variants=tuple(map(variant, variants)), watches=tuple(watches), probe_after=after, fixed_in=fixed
    ),
    st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True), min_size=1, max_size=2),
    st.lists(st.sampled_from(KEYS), max_size=1),
    st.sampled_from([(), ("vllm.meta",)]),
    st.sampled_from([None, *RELEASES]),
)
SOURCES = st.dictionaries(
    st.sampled_from(KEYS),
    st.builds(Fingerprint, st.sampled_from(DIGESTS[1:]), st.sampled_from(["()", "(a)"]), st.booleans()),
)
UPSTREAMS = st.one_of(st.none(), VERSIONS.map(upstream))
EVIDENCE = st.builds(
    Evidence,
    UPSTREAMS,
    SOURCES,
    st.sampled_from([None, *Verdict]),
)
LOCKS = st.builds(
    Lock,
    st.fixed_dictionaries(
        {
            "vllm": st.dictionaries(
                st.sampled_from(KEYS),
                st.dictionaries(st.sampled_from(DIGESTS), st.lists(st.sampled_from(RELEASES), unique=True).map(tuple)),
            )
        }
    ),
    st.fixed_dictionaries({"vllm": st.dictionaries(st.sampled_from(DIGESTS), st.sampled_from(["()", "(a)"]))}),
    st.dictionaries(
        st.just("toy"), st.dictionaries(st.sampled_from(RELEASES), st.sampled_from(["affected", "unaffected"]))
    ),
)
SETTINGS = st.builds(
    Settings,
    st.sampled_from(["off", "warn", "strict"]),
    st.sampled_from([frozenset(), frozenset({"toy"})]),
    st.sampled_from([None, frozenset({"toy"}), frozenset({"other"})]),
)


@given(PATCHES, EVIDENCE, LOCKS, SETTINGS)
def test_the_gate_never_says_applied(patch: Patch, evidence: Evidence, lock: Lock, settings: Settings) -> None:
    decision = decide(patch, evidence, lock, settings)
    assert decision.state not in (State.APPLIED, State.APPLIED_LATE)
    assert decision.reason
    assert "\n" not in decision.reason.replace(str(evidence.upstream and evidence.upstream.version), "")


@given(PATCHES, EVIDENCE, LOCKS, SETTINGS)
def test_it_acts_only_on_what_is_wanted_and_installed(
    patch: Patch, evidence: Evidence, lock: Lock, settings: Settings
) -> None:
    decision = decide(patch, evidence, lock, settings)
    free = settings.excludes("toy") is None and evidence.upstream is not None
    if not free:
        assert decision.action is Action.NOTHING
    assert (decision.action is Action.NOTHING) == (decision.state is not State.ARMED)


@given(PATCHES, EVIDENCE, LOCKS, SETTINGS)
def test_it_acts_only_where_every_target_exists(
    patch: Patch, evidence: Evidence, lock: Lock, settings: Settings
) -> None:
    decision = decide(patch, evidence, lock, settings)
    if decision.action is not Action.NOTHING:
        assert decision.variant in patch.variants
        assert decision.variant is not None
        assert {target.key for target in decision.variant.targets} <= set(evidence.sources)


@given(PATCHES, EVIDENCE, LOCKS, SETTINGS, VERSIONS, VERSIONS)
def test_the_same_sources_are_decided_alike_whatever_the_version(
    patch: Patch, evidence: Evidence, lock: Lock, settings: Settings, version: str | None, metadata: str | None
) -> None:
    if evidence.upstream is None:
        evidence = dataclasses.replace(evidence, upstream=upstream())
    assert evidence.upstream is not None
    renamed: Upstream = dataclasses.replace(evidence.upstream, version=version, metadata_version=metadata)
    one = decide(patch, evidence, lock, settings)
    two = decide(patch, dataclasses.replace(evidence, upstream=renamed), lock, settings)
    assert (one.action, one.state, one.variant) == (two.action, two.state, two.variant)


@given(VERSIONS)
def test_no_version_hides_that_the_source_is_affected_or_fixed(version: str | None) -> None:
    toy = declare("toy", ("vllm.meta", "f"), fixed_in="0.24.0")
    states = [
        decide(toy, Evidence(upstream(version), sources(digest)), lock(), Settings()).state
        for digest in (OLD, FIXED, NEW)
    ]
    assert states == [State.ARMED, State.NOT_NEEDED, State.DRIFTED]


@given(st.lists(st.tuples(st.sampled_from(DIGESTS), st.lists(st.sampled_from(RELEASES), unique=True)), max_size=4))
def test_a_release_is_recognised_only_by_all_its_functions(pairs: list[tuple[str, list[str]]]) -> None:
    keys = [f"{KEY}{index}" for index in range(len(pairs))]
    made = Lock({"vllm": {k: {d: tuple(rs)} for k, (d, rs) in zip(keys, pairs, strict=True)}}, {}, {})
    found = made.releases_with("vllm", {k: d for k, (d, _) in zip(keys, pairs, strict=True)})
    expected = set.intersection(*(set(releases) for _, releases in pairs)) if pairs else set()
    assert set(found) == expected


IDS = "abcde"
#: A source that is affected, one that is fixed, one that is in no known release, and no upstream at all.
SEEN = {digest: Evidence(upstream(), sources(digest)) for digest in (OLD, FIXED, NEW)} | {"": Evidence(None, {})}
MEASURED = Lock(lock().functions, lock().signatures, dict.fromkeys(IDS, lock().verdicts["toy"]))
STOPS = BAD | {State.DISABLED, State.REVERTED}


@st.composite
def declarations(draw: st.DrawFn, *, circles: bool) -> dict[str, Patch]:
    """Patches that need one another or what nobody declares; without circles only those of later letters."""
    made = {}
    for place, name in enumerate(IDS):
        others = [*(IDS if circles else IDS[place + 1 :]), "undeclared"]
        needs = draw(st.lists(st.sampled_from(others), max_size=3, unique=True))
        made[name] = declare(name, ("vllm.meta", "f"), requires=tuple(needs))
    return {name: made[name] for name in draw(st.permutations(IDS))}


SEEN_OF_ALL = st.fixed_dictionaries({name: st.sampled_from(list(SEEN)).map(SEEN.__getitem__) for name in IDS})
KNOWN = st.dictionaries(st.sampled_from(IDS), st.sampled_from([state for state in State if state is not State.ARMED]))
CHOSEN = st.frozensets(st.sampled_from(IDS)).map(lambda ids: Settings(disable=ids))


def one_by_one(
    patches: dict[str, Patch], seen: dict[str, Evidence], chosen: Settings, known: dict[str, State]
) -> dict[str, Decision]:
    """Decide on each patch by following its needs from it, again for every patch."""

    def of(name: str, above: tuple[str, ...]) -> Decision:
        alone = decide(patches[name], seen[name], MEASURED, chosen)
        blocked = why(name, (*above, name)) if alone.action is not Action.NOTHING else None
        return Decision(Action.NOTHING, *blocked) if blocked else alone

    def why(name: str, above: tuple[str, ...]) -> tuple[State, str] | None:
        for need in patches[name].requires:
            if need not in patches:
                return State.DRIFTED, f"needs {need}, which is not declared"
            if need in above:
                return State.DRIFTED, f"needs {need}, which needs it in turn"
            state = known.get(need) or of(need, above).state
            idle = decide(patches[need], seen[need], MEASURED, Settings()).state is State.NOT_NEEDED
            if state in STOPS and not (state is State.DISABLED and idle):
                return state, f"needs {need}, which is {state.value}"
        return None

    return {name: of(name, ()) for name in patches}


def outcome(decision: Decision) -> tuple[Action, State, str, Variant | None]:
    return decision.action, decision.state, decision.reason, decision.variant


@given(declarations(circles=False), SEEN_OF_ALL, CHOSEN, KNOWN)
def test_one_pass_decides_as_following_the_needs_of_each_patch(
    patches: dict[str, Patch], seen: dict[str, Evidence], chosen: Settings, known: dict[str, State]
) -> None:
    expected = one_by_one(patches, seen, chosen, known)
    found = decide_all(patches, seen, MEASURED, chosen, known)
    assert {name: outcome(d) for name, d in found.items()} == {name: outcome(d) for name, d in expected.items()}
    assert list(found) == list(patches)


@given(declarations(circles=True), SEEN_OF_ALL, CHOSEN)
def test_in_a_circle_the_same_patches_are_set_and_the_others_say_why(
    patches: dict[str, Patch], seen: dict[str, Evidence], chosen: Settings
) -> None:
    """Which patch of a circle is met first decides which of the reasons it gives, and no more."""
    expected = one_by_one(patches, seen, chosen, {})
    found = decide_all(patches, seen, MEASURED, chosen)
    assert {name: d.action for name, d in found.items()} == {name: d.action for name, d in expected.items()}
    for name, decision in found.items():
        if decide(patches[name], seen[name], MEASURED, chosen).action is Action.NOTHING or decision.blocked is None:
            assert outcome(decision) == outcome(expected[name])
        else:
            assert decision.state in STOPS
            assert decision.reason.startswith("needs ")


@given(declarations(circles=True), SEEN_OF_ALL, CHOSEN, KNOWN)
def test_nothing_is_set_whose_need_is_not_in_force(
    patches: dict[str, Patch], seen: dict[str, Evidence], chosen: Settings, known: dict[str, State]
) -> None:
    found = decide_all(patches, seen, MEASURED, chosen, known)
    for name, decision in found.items():
        if decision.action is not Action.NOTHING:
            for need in patches[name].requires:
                state = known.get(need) or found[need].state
                idle = decide(patches[need], seen[need], MEASURED, Settings()).state is State.NOT_NEEDED
                assert state not in STOPS or (state is State.DISABLED and idle)


def test_a_patch_that_is_not_set_anyway_closes_no_circle() -> None:
    """b needs a, a needs d, and d needs both; a is fixed here."""
    needs = {"b": ("a",), "a": ("d",), "d": ("a", "b")}
    patches = {name: declare(name, ("vllm.meta", "f"), requires=of) for name, of in needs.items()}
    seen = {name: SEEN[FIXED if name == "a" else OLD] for name in needs}
    found = decide_all(patches, seen, MEASURED, Settings())
    assert {name: decision.action for name, decision in found.items()} == {
        "b": Action.APPLY,
        "a": Action.NOTHING,
        "d": Action.APPLY,
    }
