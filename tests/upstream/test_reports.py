"""A report that is ready to be filed must show its defect to whoever runs it, with nothing of ours in the process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ultra_patches.core import discover

pytestmark = pytest.mark.upstream
ROOT = Path(__file__).parents[2]
REPORTS = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/reports/*-*.md")}
#: The last line that each prints, or its error.
SHOWN = {
    "vllm-reload-duplicate-weights": "Parameter containing:\ntensor([nan, nan, nan, nan])",
    "vllm-reload-late-parameters": "AttributeError: 'Module' object has no attribute 'sink'",
    "vllm-reload-live-write": "Parameter containing:\ntensor([2., 2.])",
    "vllm-reload-receive-buffer": "Parameter containing:\ntensor([3., 3.])",
}
POISON = "import torch\ntorch.utils.deterministic.fill_uninitialized_memory = True\ntorch.use_deterministic_algorithms(True)\n"


def test_every_report_is_declared_and_complete_and_those_in_python_are_run() -> None:
    declared = {patch.id: patch.report for patch in discover.patches()[0].values() if patch.report is not None}
    assert declared == {patch_id: f"docs/reports/{patch_id}.md" for patch_id in REPORTS}
    assert REPORTS.keys() - SHOWN.keys() == {"vllm-cpu-moe-prepack"}, "its steps need an engine: tests/engine"
    for text in REPORTS.values():
        assert re.fullmatch(r"# .+\n\n## Reproduction\n\n.+\n\n## Expected\n\n.+\n\n## Change\n\n.+\n", text, re.DOTALL)


@pytest.mark.parametrize("patch_id", SHOWN)
def test_the_reproduction_shows_the_defect(patch_id: str) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", REPORTS[patch_id], re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", POISON + code],
        env={**os.environ, "ULTRA_PATCHES": "off", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert SHOWN[patch_id] in done.stdout + done.stderr, done.stdout + done.stderr[-2000:]
