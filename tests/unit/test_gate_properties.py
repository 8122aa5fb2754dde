"""What holds of the gate for any evidence: it never claims, never acts against a wish, never goes by the version."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.core.facts import Upstream
from ultra_patches.core.fingerprint import Source
from ultra_patches.core.gate import Action, Evidence, State, decide
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
    st.builds(Source, st.sampled_from(DIGESTS[1:]), st.sampled_from(["()", "(a)"]), st.booleans()),
)
UPSTREAMS = st.one_of(st.none(), VERSIONS.map(upstream))
EVIDENCE = st.builds(
    Evidence,
    UPSTREAMS,
    SOURCES,
    st.sampled_from([None, *Verdict]),
    st.sampled_from(
        [None, (State.FAILED, "needs base"), (State.DISABLED, "needs base"), (State.REVERTED, "needs base")]
    ),
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
def test_it_acts_only_on_what_is_wanted_installed_and_not_blocked(
    patch: Patch, evidence: Evidence, lock: Lock, settings: Settings
) -> None:
    decision = decide(patch, evidence, lock, settings)
    free = settings.excludes("toy") is None and evidence.upstream is not None and evidence.blocked is None
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
