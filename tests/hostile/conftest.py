"""The folders of stubs that the unit tests have, for fresh interpreters; and the count of what was tried."""

from collections.abc import Iterator
from typing import Any

import pytest

from examples.errors import RunError
from tests.unit.conftest import _private, site

__all__ = ["_private", "site"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count a test as one input, or as many as end in an error of one line; one that tries more says so itself.

    The run ends with a table of all (`tests/conftest.py`).
    """
    errors = 0
    made = RunError.__init__

    def count(self: RunError, *arguments: Any) -> None:
        nonlocal errors
        errors += 1
        made(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunError, "__init__", count)
        try:
            yield
        finally:
            if not any(name == "tried" for name, _ in item.user_properties):
                item.user_properties.append(("tried", [max(1, errors), errors]))
