"""The environment is read into settings, and what means nothing becomes a line that says what was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.text(), st.text(), st.text())
def test_any_text_gives_a_known_mode_and_one_line_a_complaint(mode: str, disable: str, only: str) -> None:
    variables = {"ULTRA_PATCHES": mode, "ULTRA_PATCHES_DISABLE": disable, "ULTRA_PATCHES_ONLY": only}
    read = settings.read(IDS, variables)
    assert read.mode in settings.MODES
    assert (mode.strip().lower() in ("", *settings.MODES)) == (not any("is not off" in c for c in read.complaints))
    assert not any("\n" in line for line in read.complaints)
