"""The environment is read into settings, and what means nothing becomes a line that says what was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches import flags
from ultra_patches.core import settings

IDS = ("vllm-ipc-rank-layout", "vllm-mamba-conv-weights", "vllm-reload-numel-guard")


def test_nothing_set() -> None:
    assert settings.read(IDS, {}) == settings.Settings("warn", frozenset(), None, ())


@pytest.mark.parametrize("mode", ["off", "warn", "strict", " Strict ", "OFF"])
def test_modes(mode: str) -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES": mode})
    assert (read.mode, read.complaints) == (mode.strip().lower(), ())


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_a_blank_mode_is_the_default(blank: str) -> None:
    assert settings.read(IDS, {"ULTRA_PATCHES": blank}) == settings.read(IDS, {})


def test_an_unknown_mode_is_told_and_the_nearest_named() -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES": "stict"})
    assert read.mode == "warn"
    assert read.complaints == ("ULTRA_PATCHES='stict' is not off, warn or strict (did you mean strict?); using warn",)


@pytest.mark.parametrize("variable", ["ULTRA_PATCHES_DISABLE", "ULTRA_PATCHES_ONLY"])
def test_an_unknown_id_is_told_and_the_nearest_named(variable: str) -> None:
    (line,) = settings.read(IDS, {variable: "vllm-reload-numel-gard"}).complaints
    assert line.startswith(f"{variable}: no patch is called 'vllm-reload-numel-gard' (did you mean vllm-reload-numel")


def test_an_id_near_to_none_lists_them_all() -> None:
    (line,) = settings.read(IDS, {"ULTRA_PATCHES_DISABLE": "?????"}).complaints
    assert all(patch_id in line for patch_id in IDS)


def test_blanks_and_empty_parts_between_ids_mean_nothing() -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES_DISABLE": f" {IDS[0]} ,, {IDS[1]},"})
    assert (read.disable, read.complaints) == (frozenset(IDS[:2]), ())


def test_disabled() -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES_DISABLE": IDS[0]})
    assert [read.excludes(patch_id) for patch_id in IDS] == ["listed in ULTRA_PATCHES_DISABLE", None, None]


def test_only() -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES_ONLY": IDS[0]})
    assert [read.excludes(i) for i in IDS] == [None, *["not listed in ULTRA_PATCHES_ONLY"] * 2]


@pytest.mark.parametrize("blank", ["", " ", ","])
def test_a_blank_only_excludes_nothing(blank: str) -> None:
    assert settings.read(IDS, {"ULTRA_PATCHES_ONLY": blank}).excludes(IDS[0]) is None


def test_an_id_that_is_in_only_and_in_disable_is_disabled() -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES_ONLY": ",".join(IDS[:2]), "ULTRA_PATCHES_DISABLE": IDS[0]})
    assert [read.excludes(patch_id) is None for patch_id in IDS] == [False, True, False]


def test_off_excludes_everything() -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES": "off", "ULTRA_PATCHES_ONLY": IDS[0]})
    assert {read.excludes(patch_id) for patch_id in IDS} == {"ULTRA_PATCHES=off"}


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRA_PATCHES", "strict")
    assert settings.read(IDS).mode == "strict"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ULTRA_PATCHES_ONYL", "ULTRA_PATCHES_ONLY"),
        ("ULTRA_PATCHES_DISABLED", "ULTRA_PATCHES_DISABLE"),
        ("ULTRA_PATCHES_RUNDIR", "ULTRA_PATCHES_RUN_DIR"),
        ("ULTRA_PATCHES_ATOMIC", "ULTRA_PATCHES_ATOMIC_RELOAD"),
        ("ULTRA_PATCHES_UNMERGED", "ULTRA_PATCHES_ALLOW_UNMERGED"),
        ("ULTRAPATCHES", "ULTRA_PATCHES"),
        ("ULTRA_PATCH", "ULTRA_PATCHES"),
        ("ULTRA_PATCH_ONLY", "ULTRA_PATCHES_ONLY"),
        ("ULTRAPATCHES_RUN_DIR", "ULTRA_PATCHES_RUN_DIR"),
        ("ULTRA-PATCHES", "ULTRA_PATCHES"),
        ("ultra_patches", "ULTRA_PATCHES"),
        ("Ultra_Patches_Only", "ULTRA_PATCHES_ONLY"),
        ("ULTRA_PATHCES", "ULTRA_PATCHES"),
        ("ULTRA_PACHES_DISABLE", "ULTRA_PATCHES_DISABLE"),
    ],
)
def test_a_variable_that_begins_like_ours_is_told(name: str, meant: str) -> None:
    (line,) = settings.read(IDS, {name: "1"}).complaints
    assert line == f"{name} is no variable of ultra-patches (did you mean {meant}?)"


@pytest.mark.parametrize(
    "name", ["ULTRA", "ULTRALYTICS_DIR", "ULTRA_PATH", "ULTRA_PARAMS", "PATCHES", "XULTRA_PATCHES"]
)
def test_a_variable_of_somebody_else_is_not(name: str) -> None:
    assert settings.read(IDS, {name: "1"}).complaints == ()


@pytest.mark.parametrize("name", flags.FLAGS)
@pytest.mark.parametrize(
    ("text", "on"),
    [
        *((word, True) for word in ("1", "true", "True", "TRUE", "yes", "Yes", "on", " ON ", "1 ", "\ttrue\n")),
        *((word, False) for word in ("", " ", "0", "false", "False", "no", "NO", "off", " Off ")),
    ],
)
def test_a_flag_is_understood_in_every_spelling(name: str, text: str, on: bool) -> None:
    assert flags.is_on(name, {name: text}) is on
    assert settings.read(IDS, {name: text}).complaints == ()


@pytest.mark.parametrize("text", ["2", "y", "enable", "ja", "1.0", "None"])
def test_any_other_value_of_a_flag_is_told(text: str) -> None:
    (line,) = settings.read(IDS, {flags.ATOMIC_RELOAD: text}).complaints
    assert line == f"ULTRA_PATCHES_ATOMIC_RELOAD={text!r} is neither on nor off (write 1 or 0); taken as off"
    assert not flags.is_on(flags.ATOMIC_RELOAD, {flags.ATOMIC_RELOAD: text})


@pytest.mark.parametrize(
    ("text", "mode"), [("0", "off"), (" No ", "off"), ("false", "off"), ("1", "warn"), ("TRUE", "warn")]
)
def test_the_mode_as_a_flag(text: str, mode: str) -> None:
    read = settings.read(IDS, {"ULTRA_PATCHES": text})
    assert (read.mode, read.complaints) == (mode, ())


@given(st.text(), st.text(), st.text())
def test_any_text_gives_a_known_mode_and_one_line_a_complaint(mode: str, disable: str, only: str) -> None:
    variables = {"ULTRA_PATCHES": mode, "ULTRA_PATCHES_DISABLE": disable, "ULTRA_PATCHES_ONLY": only}
    read = settings.read(IDS, variables)
    assert read.mode in settings.MODES
    known = mode.strip().lower() in settings.MODES or flags.meaning(mode) is not None
    assert known == (not any("is not off" in c for c in read.complaints))
    assert not any("\n" in line for line in read.complaints)
