"""How tests are spread over processes (`pytest -n 3 --dist loadgroup`): those that share something run in the same one."""

import pytest

from tests.support import Run

#: The longest by far, and others wait for its first run.
FIRST = "tests/grpo/test_run.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that look at one outcome, else those of one file."""
    for item in items:
        run = item.callspec.params.get("outcome") if hasattr(item, "callspec") else None
        group = f"{run.script} {run}" if isinstance(run, Run) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
