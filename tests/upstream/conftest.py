"""Each run of a case on a release is done once for all tests that look at it."""

from typing import Any

import pytest

from tests.support import Run, releases


@pytest.fixture(scope="session")
def _outcomes() -> dict[Run, dict[str, Any] | Exception]:
    return {}


@pytest.fixture
def outcome(
    request: pytest.FixtureRequest,
    _outcomes: dict[Run, dict[str, Any] | Exception],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What the script of the parameter, a Run, printed. Skips where its sources cannot be fetched."""
    run: Run = request.param
    for tree in run.trees:
        releases.tree(*tree)
    if run not in _outcomes:
        try:
            _outcomes[run] = run.execute(tmp_path_factory.mktemp("case"))
        except Exception as error:  # noqa: BLE001 # each test that looks at the run fails, and none runs it again
            _outcomes[run] = error
    found = _outcomes[run]
    if isinstance(found, Exception):
        raise found
    return found
