"""A report that is ready to be filed must show its defect to whoever runs it, with nothing of ours in the process."""

import os
import subprocess
import sys

import pytest

from ultra_patches.core import discover

pytestmark = pytest.mark.upstream
REPORTED = {patch.id: patch.report for patch in discover.patches()[0].values() if patch.report is not None}
#: The last line that each prints, or its error.
SHOWN = {
    "vllm-reload-duplicate-weights": "Parameter containing:\ntensor([nan, nan, nan, nan])",
    "vllm-reload-late-parameters": "AttributeError: 'Module' object has no attribute 'sink'",
    "vllm-reload-live-write": "Parameter containing:\ntensor([2., 2.])",
    "vllm-reload-receive-buffer": "Parameter containing:\ntensor([3., 3.])",
}
POISON = "import torch\ntorch.utils.deterministic.fill_uninitialized_memory = True\ntorch.use_deterministic_algorithms(True)\n"


def test_every_report_is_complete_and_those_in_python_are_run() -> None:
    assert REPORTED.keys() - SHOWN.keys() == {"vllm-cpu-moe-prepack"}, "its steps need an engine: tests/engine"
    for report in REPORTED.values():
        assert all((report.title, report.reproduction, report.expected, report.change))


@pytest.mark.parametrize("patch_id", SHOWN)
def test_the_reproduction_shows_the_defect(patch_id: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", POISON + REPORTED[patch_id].reproduction],
        env={**os.environ, "ULTRA_PATCHES": "off", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert SHOWN[patch_id] in done.stdout + done.stderr, done.stdout + done.stderr[-2000:]
