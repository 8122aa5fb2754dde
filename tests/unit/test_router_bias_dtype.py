"""In which dtype a tensor is sent, and the warning for a bias whose values were rounded before it came. Needs torch."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="the values of a bias are torch's")

from hypothesis import given  # noqa: E402 # torch decides whether the module is collected
from hypothesis import strategies as st  # noqa: E402

from ultra_patches import UltraPatchesWarning, sync_dtype  # noqa: E402
from ultra_patches.bias.rule import warn_if_rounded  # noqa: E402

BIAS = "model.layers.3.mlp.gate.e_score_correction_bias"
WEIGHT = "model.layers.3.mlp.gate.weight"


def trained(count: int = 512) -> torch.Tensor:
    """A bias as DeepSeek-V3 has them: large, and different between experts by less than bf16 can tell."""
    return 30 + 7e-4 * torch.rand(count, generator=torch.Generator().manual_seed(0))


def said(name: str, tensor: torch.Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync_dtype(name, tensor, torch.bfloat16)
    assert all(issubclass(warning.category, UltraPatchesWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_bias_keeps_fp32() -> None:
    assert sync_dtype(BIAS, trained(), torch.bfloat16) is torch.float32
    assert said(BIAS, trained()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_everything_else_takes_the_default(dtype: torch.dtype) -> None:
    assert sync_dtype(WEIGHT, torch.ones(4, dtype=dtype), torch.bfloat16) is torch.bfloat16
    assert said(WEIGHT, torch.ones(4, dtype=dtype)) == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", [BIAS, WEIGHT])
def test_integers_stay_what_they_are(name: str, dtype: torch.dtype) -> None:
    assert sync_dtype(name, torch.ones(4, dtype=dtype), torch.bfloat16) is dtype
    assert said(name, torch.ones(4, dtype=dtype)) == []


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_rounded_bias_is_named_with_how_many_values_are_left(low: torch.dtype) -> None:
    rounded = trained().to(low)
    (line,) = said(BIAS, rounded)
    assert BIAS in line
    assert f"{rounded.unique().numel()} distinct values for 512 experts" in line
    assert str(low).removeprefix("torch.") in line
    assert "reload it from the fp32 checkpoint" in line


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_rounded_bias_is_never_relabelled(low: torch.dtype) -> None:
    with pytest.warns(UltraPatchesWarning):
        assert sync_dtype(BIAS, trained().to(low), torch.bfloat16) is low


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_rounded_values_that_are_labelled_fp32_are_seen(low: torch.dtype) -> None:
    spread = 25 + 32 * torch.rand(512, generator=torch.Generator().manual_seed(0))
    (line,) = said(BIAS, spread.to(low).float())
    assert f"float32 with values of {str(low).removeprefix('torch.')}" in line


def test_one_value_that_was_not_rounded_is_enough() -> None:
    bias = trained().bfloat16().float()
    bias[7] += 1e-4
    assert said(BIAS, bias) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_are_what_an_untrained_router_holds(dtype: torch.dtype) -> None:
    assert said(BIAS, torch.zeros(512, dtype=dtype)) == []


def test_a_bias_without_values_passes() -> None:
    assert said(BIAS, torch.empty(0)) == []
    assert said(BIAS, torch.empty(512, device="meta")) == []


def test_the_bias_is_not_touched() -> None:
    bias = torch.nn.Parameter(trained().bfloat16().float())
    before = bias.detach().clone()
    assert len(said(BIAS, bias)) == 1
    assert torch.equal(bias, before)
    assert bias.requires_grad


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=16))
def test_warned_exactly_where_every_value_survives_a_round_trip(values: list[float]) -> None:
    bias = torch.tensor(values)
    survives = any(torch.equal(bias.to(low).float(), bias) for low in (torch.bfloat16, torch.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert warn_if_rounded(BIAS, bias) == (survives and bool(bias.count_nonzero()))
        assert sync_dtype(BIAS, bias, torch.bfloat16) is torch.float32
