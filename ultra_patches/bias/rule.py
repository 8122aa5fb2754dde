"""The rule that keeps a router's expert bias exact on its way from the trainer to the rollout.

The bias of a router without auxiliary loss (DeepSeek-V3, arXiv:2412.19437, section 2.1.2) is fp32, large (25 to 57 in
trained models) and differs between experts by about 7e-4: bf16 leaves one distinct value of 512. Whether it was rounded
cannot be told from its dtype, because Megatron relabels rounded values fp32; it can be told from the values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ultra_patches.errors import UltraPatchesError, UltraPatchesWarning

if TYPE_CHECKING:
    import torch

#: Last parts of the names under which models keep it: Hugging Face's and vLLM's, Megatron's, and core 0.19's QB bias.
BIAS_NAMES = frozenset({"e_score_correction_bias", "expert_bias", "correction_bias", "qb_beta", "qb_beta_accum"})
#: Last parts of the names of the modules that route, which hold `weight`.
_ROUTERS = frozenset({"gate", "router", "wg", "classifier"})


def is_router_bias(name: str) -> bool:
    """Whether a parameter or buffer of this name is a router's expert bias."""
    return name.rpartition(".")[2] in BIAS_NAMES


def sync_dtype(name: str, tensor: torch.Tensor, default: torch.dtype) -> torch.dtype:
    """The dtype in which a trainer's exporter must send a tensor.

    `default` for floating point in general; the tensor's own dtype for integers and for a router's expert bias. A bias
    that arrives already rounded keeps its dtype and is named in an UltraPatchesWarning: what is lost cannot be restored.
    """
    if not tensor.is_floating_point():
        return tensor.dtype
    if is_router_bias(name):
        warn_if_rounded(name, tensor)
        return tensor.dtype
    return default


def warn_if_rounded(name: str, bias: torch.Tensor) -> bool:
    """Warn where a bias holds bf16 or fp16 values, whatever its dtype says; gives whether it does.

    Zeros are what an untrained router holds, so they pass.
    """
    import torch

    if bias.is_meta or bias.numel() == 0:
        return False
    values = bias.detach()
    if values.dtype in (torch.bfloat16, torch.float16):
        stored = str(values.dtype).removeprefix("torch.")
        rounded = bool(values.count_nonzero())
    else:
        # Values that all survive a round trip have been through it: 512 trained values do not by chance.
        low = next(
            (d for d in (torch.bfloat16, torch.float16) if torch.equal(values.to(d).to(values.dtype), values)), None
        )
        stored = f"{str(values.dtype).removeprefix('torch.')} with values of {str(low).removeprefix('torch.')}"
        rounded = low is not None and bool(values.count_nonzero())
    if rounded:
        distinct = values.unique().numel()
        warnings.warn(
            f"router bias {name} arrives already rounded: {stored}, {distinct} distinct values for {values.numel()} "
            "experts. It is passed on as it is; reload it from the fp32 checkpoint after the model was wrapped",
            UltraPatchesWarning,
            stacklevel=3,
        )
    return rounded


def _block(weight: str) -> str:
    """The module that holds router and experts: two parts above the weight, three for `router.classifier.weight`."""
    parts = weight.split(".")
    return ".".join(parts[: -3 if parts[-3:-2] and parts[-3] in _ROUTERS else -2])


def check_router_biases(names: Iterable[str], *, required: bool | None = None) -> None:
    """Raise UltraPatchesError unless every router among the exported names comes with its expert bias.

    `names` are the Hugging Face names of one whole export. By default the bias is expected of every router if any name
    is one, which catches a mapping that covers only some layers (Megatron-Bridge#4657); `required=True` expects it in
    any case, which catches a mapping that covers none.
    """
    given = set(names)
    experts = {name.partition(".experts.")[0] for name in given if ".experts." in name}
    routers = {
        name.rpartition(".")[0]: _block(name)
        for name in given
        if name.endswith(".weight") and name.split(".")[-2] in _ROUTERS and _block(name) in experts
    }
    biased = {name for name in given if is_router_bias(name)}
    if not (biased if required is None else required):
        return
    # The bias stands in the router, beside it, or in a module of its own (`moe_statics`) in the same block.
    owners = {name.rpartition(".")[0] for name in biased} | {name.rsplit(".", 2)[0] for name in biased}
    missing = sorted(r for r, block in routers.items() if not owners & {r, r.rpartition(".")[0], block})
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UltraPatchesError(
            f"{len(missing)} of {len(routers)} routers are exported without their expert bias: {shown}. The rollout would "
            "route with a stale bias: map `…router.expert_bias` in the exporter (Megatron-Bridge does since 0.6.0)"
        )
