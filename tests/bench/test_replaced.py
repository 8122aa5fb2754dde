"""A replaced function costs what the upstream's own corrected function costs, call by call in one process."""

from __future__ import annotations

import inspect
import statistics
import time
from typing import Any

import pytest

pytestmark = pytest.mark.upstream
CALLS, ROUNDS = 200, 41


@pytest.fixture(name="case")
def _case() -> tuple[Any, Any, tuple[Any, ...]]:
    """Our function, the release's own, and the arguments of a call."""
    import torch
    from vllm.model_executor.model_loader.reload import meta

    from ultra_patches.reload import session

    def loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    upstream: Any = meta.get_numel_loaded
    target = torch.nn.Parameter(torch.zeros(64, 64, device="meta"), requires_grad=False)
    bound = inspect.signature(loader).bind(param=target, loaded_weight=torch.ones(64, 64))
    return session.seam(session.count, session.Rule.CAP)(upstream, meta), upstream, (loader, bound)


def test_numel_guard_counts_what_the_function_of_a_release_that_is_fixed_counts(case: Any) -> None:
    ours, upstream, arguments = case
    assert ours(*arguments)[0] == upstream(*arguments)[0] == 64 * 64


@pytest.mark.timing
def test_numel_guard_against_the_function_of_a_release_that_is_fixed(case: Any) -> None:
    ours, upstream, arguments = case

    def seconds(function: Any) -> float:
        # Time of this process alone, so that others on the machine do not count.
        began = time.process_time()
        for _ in range(CALLS):
            function(*arguments)
        return time.process_time() - began

    # Pairs in turn, so that a change in the machine's speed meets both alike.
    pairs = [(seconds(ours), seconds(upstream)) for _ in range(ROUNDS)]
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    print(f"ours / upstream's: {ratio:.3f}")
    assert ratio <= 1.05
