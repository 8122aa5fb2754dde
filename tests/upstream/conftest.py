"""Each run of a case on a release is done once for all tests that look at it, two at a time and in the tests' order."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.support import Run, releases


@pytest.fixture(scope="session")
def _outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[Run, "Future[dict[str, Any]]"]]:
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = dict.fromkeys(params["outcome"] for params in calls if isinstance(params.get("outcome"), Run))
    pool = ThreadPoolExecutor(max_workers=2)
    try:
        yield {run: pool.submit(run.execute, tmp_path_factory.mktemp("case")) for run in wanted}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, _outcomes: Mapping[Run, "Future[dict[str, Any]]"]) -> dict[str, Any]:
    """What the script of the parameter, a Run, printed. Skips where its sources cannot be fetched."""
    for tree in request.param.trees:
        releases.tree(*tree)
    return _outcomes[request.param].result()
