"""How tests are spread over processes (`pytest -n 3 --dist loadgroup`): those that share something run in the same one."""

import pytest

from tests.support import Run

#: The longest by far, and others wait for its first run.
FIRST = "tests/grpo/test_run.py"
#: What waits for it comes when it is there.
LATER = {"tests/grpo/test_lora.py": "tests/u"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that look at one outcome, else those of one file."""
    for item in items:
        run = item.callspec.params.get("outcome") if hasattr(item, "callspec") else None
        group = f"{run.script} {run}" if isinstance(run, Run) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))

    def place(item: pytest.Item) -> tuple[bool, str]:
        file = item.nodeid.partition("::")[0]
        return file != FIRST, LATER.get(file, file)

    items.sort(key=place)
