"""Every router of an export must come with its expert bias, by the names that models give to both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.bias.rule import check_router_biases, is_router_bias
from ultra_patches.errors import UltraPatchesError

BIAS = "e_score_correction_bias"


def deepseek(layer: int, *, bias: bool = True) -> list[str]:
    mlp = f"model.layers.{layer}.mlp"
    experts = [f"{mlp}.experts.{e}.{p}_proj.weight" for e in range(2) for p in ("gate", "up", "down")]
    return [f"{mlp}.gate.weight", *experts, *([f"{mlp}.gate.{BIAS}"] if bias else [])]


def nemotron(layer: int, *, bias: bool = True) -> list[str]:
    mixer = f"backbone.layers.{layer}.mixer"
    experts = [f"{mixer}.experts.{e}.{p}_proj.weight" for e in range(2) for p in ("up", "down")]
    return [f"{mixer}.gate.weight", *experts, *([f"{mixer}.gate.{BIAS}"] if bias else [])]


def ernie(layer: int, *, bias: bool = True) -> list[str]:
    mlp = f"model.layers.{layer}.mlp"
    experts = [f"{mlp}.experts.{e}.up_gate_proj.weight" for e in range(2)]
    return [f"{mlp}.gate.weight", *experts, *([f"{mlp}.moe_statics.{BIAS}"] if bias else [])]


def minimax(layer: int, *, bias: bool = True) -> list[str]:
    moe = f"model.layers.{layer}.block_sparse_moe"
    return [f"{moe}.gate.weight", f"{moe}.experts.0.w1.weight", *([f"{moe}.{BIAS}"] if bias else [])]


def longcat(layer: int, *, bias: bool = True) -> list[str]:
    """transformers' LongcatFlashTopkRouter keeps its weight one module deeper, in `classifier`."""
    mlp = f"model.layers.{layer}.mlp"
    experts = [f"{mlp}.experts.{e}.down_proj.weight" for e in range(2)]
    return [f"{mlp}.router.classifier.weight", *experts, *([f"{mlp}.router.{BIAS}"] if bias else [])]


def dense(layer: int) -> list[str]:
    mlp = f"model.layers.{layer}.mlp"
    return [f"{mlp}.{p}_proj.weight" for p in ("gate", "up", "down")] + [
        f"model.layers.{layer}.self_attn.q_proj.weight"
    ]


FAMILIES = [deepseek, nemotron, ernie, minimax, longcat]
Family = Callable[..., list[str]]


@pytest.mark.parametrize("name", ["mlp.gate.e_score_correction_bias", "router.expert_bias", "moe.correction_bias"])
def test_names_of_a_bias(name: str) -> None:
    assert is_router_bias(f"model.layers.0.{name}")


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.gate.bias", "expert_bias.weight", "my_expert_bias"])
def test_names_of_something_else(name: str) -> None:
    assert not is_router_bias(f"model.layers.0.{name}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("required", [None, True, False])
def test_a_whole_export_passes(family: Family, required: bool | None) -> None:
    check_router_biases(dense(0) + family(1) + family(2), required=required)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_that_lacks_its_bias_is_named(family: Family) -> None:
    with pytest.raises(UltraPatchesError, match="1 of 2 routers are exported without their expert bias: ") as error:
        check_router_biases(dense(0) + family(1, bias=False) + family(2))
    assert "layers.1." in str(error.value)
    assert "layers.2." not in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bias_at_all_is_an_error_where_it_is_required(family: Family) -> None:
    names = family(1, bias=False) + family(2, bias=False)
    check_router_biases(names)
    check_router_biases(names, required=False)
    with pytest.raises(UltraPatchesError, match="2 of 2 routers"):
        check_router_biases(names, required=True)


def test_a_bias_for_the_mtp_layers_only_names_the_main_layers() -> None:
    """Megatron-Bridge#4657."""
    main = [name for layer in range(3, 6) for name in deepseek(layer, bias=False)]
    with pytest.raises(UltraPatchesError, match="3 of 4 routers") as error:
        check_router_biases(main + deepseek(61))
    for layer in range(3, 6):
        assert f"model.layers.{layer}.mlp.gate" in str(error.value)
    assert "model.layers.61" not in str(error.value)
    assert "router.expert_bias" in str(error.value)


def test_many_layers_are_shortened() -> None:
    names = [name for layer in range(10, 20) for name in deepseek(layer, bias=False)]
    with pytest.raises(UltraPatchesError, match=r"model\.layers\.14\.mlp\.gate and 5 more\. "):
        check_router_biases(names, required=True)


def test_qwen3_moe_has_no_bias_and_passes() -> None:
    check_router_biases(deepseek(0, bias=False) + deepseek(1, bias=False))


def test_a_dense_gate_projection_is_no_router() -> None:
    check_router_biases(dense(0) + dense(1), required=True)
    check_router_biases(dense(0) + deepseek(1), required=True)


def test_the_gate_of_the_shared_expert_is_no_router() -> None:
    shared = ["model.layers.1.mlp.shared_expert_gate.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"]
    check_router_biases(deepseek(1) + shared, required=True)


def test_experts_in_one_tensor_have_a_router_too() -> None:
    fused = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.router.weight"]
    with pytest.raises(UltraPatchesError, match=r"model\.layers\.0\.mlp\.router"):
        check_router_biases(fused, required=True)


@pytest.mark.parametrize("names", [[], ["weight"], [".weight"], ["gate.weight", "experts.0.weight"], [BIAS]])
def test_names_that_are_short(names: list[str]) -> None:
    check_router_biases(names, required=True)


LAYERS = st.dictionaries(st.integers(0, 99), st.tuples(st.sampled_from(FAMILIES[:4]), st.booleans()), max_size=6)


@given(LAYERS, st.sampled_from([None, True]), st.randoms())
def test_exactly_the_layers_without_a_bias_are_named(
    layers: dict[int, tuple[Family, bool]], required: bool | None, random: object
) -> None:
    names = [name for layer, (family, bias) in layers.items() for name in family(layer, bias=bias)] + dense(100)
    random.shuffle(names)  # type: ignore[attr-defined] # hypothesis gives a random.Random
    missing = sorted(layer for layer, (_, bias) in layers.items() if not bias)
    expected = bool(missing) and (required is True or len(missing) < len(layers))
    if not expected:
        check_router_biases(names, required=required)
        return
    with pytest.raises(UltraPatchesError, match=f"^{len(missing)} of {len(layers)} routers"):
        check_router_biases(names, required=required)
