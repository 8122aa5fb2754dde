"""For tests of code that relies on the patches: `@pytest.mark.requires_patch("vllm-ipc-rank-layout")`.

Loaded by pytest where the package is installed. That imports the package and so arms the patches, as in the processes
under test; `ULTRA_PATCHES=off` or `-p no:ultra_patches` turns it off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

import ultra_patches
from ultra_patches.core.gate import State


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, also under `--strict-markers`."""
    config.addinivalue_line(
        "markers", "requires_patch(*ids): fails unless each patch is in force in this process or is not needed"
    )


def pytest_report_header() -> str:
    """The version, and how many patches are in which state before the first test."""
    states = Counter(row.state.value for row in ultra_patches.status())
    counted = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    return f"ultra-patches {ultra_patches.__version__}: {counted or 'no patches'}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail, and never skip: a test that ran without its patch would prove nothing.

    After the fixtures, because one of them may import the upstream.
    """
    for mark in item.iter_markers("requires_patch"):
        if not mark.args or mark.kwargs:
            pytest.fail(
                "requires_patch takes one patch id or more, as in requires_patch('vllm-ipc-rank-layout')", False
            )
        for patch_id in mark.args:
            try:
                ultra_patches.require(patch_id)
            except ultra_patches.UltraPatchesError as error:
                pytest.fail(str(error), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,  # noqa: ARG001 - pytest passes by name
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say under a failure which functions of the upstreams were ours."""
    report = yield
    if report.failed:
        rows = [row for row in ultra_patches.status() if row.state in (State.APPLIED, State.APPLIED_LATE)]
        lines = [
            f"{row.id} {row.state.value} to {row.upstream} {row.version}: {', '.join(row.targets)}" for row in rows
        ]
        if lines:
            report.sections.append(("patches in force", "\n".join(lines)))
    return report
