"""What the patches of single vLLM models share whose router bias takes the model's dtype."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ultra_patches.patch import Build, Finding, Verdict

#: Two biases that bf16 cannot tell apart.
_VALUES = (37.0, 37.0001)


def keep_fp32(bias: str) -> Build:
    """A build for an MoE block's `__init__`: afterwards the parameter `bias`, wherever in the block, is fp32.

    The parameter stays the object that the experts were given. Shape (num_experts,).
    """

    def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for block in self.modules():
                param = block._parameters.get(bias)
                if param is not None:
                    param.data = param.data.float()

        return __init__

    return build


def probe(module_name: str, class_name: str, bias: str, **config: object) -> Finding:
    """Make the block of a bf16 model, with layers that hold nothing, and write two biases into it as a loader does."""
    import torch

    module = importlib.import_module(module_name)
    with _hollow(module), torch.device("cpu"), _default_dtype(torch.bfloat16):
        block = getattr(module, class_name)(config=SimpleNamespace(hidden_act="silu", hidden_size=8, **config))
        parameters = {name.rpartition(".")[2]: param for name, param in block.named_parameters()}
        if bias not in parameters:
            return Finding(Verdict.INCONCLUSIVE, f"{class_name} has no {bias}")
        parameters[bias].data.copy_(torch.tensor(_VALUES, dtype=torch.float32))
        got = parameters[bias].tolist()
    if len(set(got)) == 2:
        return Finding(Verdict.CLEAN, f"{bias} is {parameters[bias].dtype}")
    return Finding(
        Verdict.DEFECT, f"{bias} is {parameters[bias].dtype}: sent {_VALUES[0]} and {_VALUES[1]}, both are {got[0]}"
    )


@contextlib.contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _hollow(module: ModuleType) -> Iterator[None]:
    """The layers and groups that a block is made of, without weights and without processes."""
    from unittest import mock

    import torch

    class Hollow(torch.nn.Module):  # type: ignore[misc] # torch is not followed
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    group = mock.MagicMock(rank_in_group=0)
    group.device_group.size.return_value = 1
    config = mock.MagicMock()
    config.parallel_config.eplb_config.num_redundant_experts = 0
    stand_ins = {
        **dict.fromkeys(("ReplicatedLinear", "GateLinear", "FusedMoE", "SharedFusedMoE", "FusedMoEFactory"), Hollow),
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_ep_group": lambda: group,
        "get_current_vllm_config": lambda: config,
    }
    with contextlib.ExitStack() as stack:
        for name in filter(lambda name: hasattr(module, name), stand_ins):
            stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
        yield
