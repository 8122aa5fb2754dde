"""How tests are spread over processes (`pytest -n 3 --dist loadgroup`): those that share something run in the same one."""

from collections import Counter
from typing import Any

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what `tests/hostile` tried: inputs, and how many of them ended in a clear error."""
    rows: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            inputs, errors = dict(report.user_properties).get("tried", (0, 0))
            if inputs:
                subject = report.nodeid.partition("::")[0].rpartition("test_")[2].removesuffix(".py")
                counts = rows.setdefault(subject, Counter())
                counts.update({"inputs": inputs, "clear errors": errors, "failed": outcome == "failed"})
    if not rows:
        return
    rows["all"] = sum(rows.values(), Counter())
    terminalreporter.section("hostile inputs")
    for subject, counts in rows.items():
        said = ", ".join(f"{counts[name]:5} {name}" for name in ("inputs", "clear errors", "failed"))
        terminalreporter.line(f"{subject:14}{said}")
