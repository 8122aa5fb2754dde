"""The released SkyRL and OpenRLHF: the one import in their package arms the actor that runs vLLM, and nothing else does.

And SkyRL 0.3.0's own patch of the same function: it is named, whoever came first, and never overwritten.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import releases

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
PACKAGES = {
    "skyrl": (("skyrl", "0.4.0"), "skyrl", (("skyrl-gym", "0.4.0"),)),
    "openrlhf": (("openrlhf", "0.11.2"), "openrlhf-0.11.2.data/purelib/openrlhf", ()),
}


def run(script: str, *arguments: str, path: list[Path], **env: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *([script] if script.endswith(".py") else ["-c", script]), *arguments],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("ULTRA_PATCHES")},
            "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "RAY_USAGE_STATS_ENABLED": "0",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("line", ["import ultra_patches\n", ""], ids=["with the line", "without it"])
@pytest.mark.parametrize("framework", PACKAGES)
def test_the_actor_that_runs_vllm(framework: str, line: str, tmp_path: Path) -> None:
    wheel, inside, more = PACKAGES[framework]
    shutil.copytree(releases.tree(*wheel) / inside, tmp_path / framework)
    entry = tmp_path / framework / "__init__.py"
    entry.write_text(line + (entry.read_text() if entry.exists() else ""))
    others = [releases.tree(*tree) for tree in more]
    seen = run(str(Path(__file__).with_name("framework_case.py")), framework, path=[tmp_path, *others])
    assert seen["worker"]["entry imported"]
    for status in (seen["driver"], seen["worker"]["status"]):
        if line:
            assert status["vllm-ipc-rank-layout"] == status["vllm-reload-keep-unsent"] == "applied"
            assert not {"conflict", "failed", "drifted"} & set(status.values()), status
        else:
            assert status == {}, "a process of the framework that is no engine is not reached by vLLM's plug-in"


SKYRL_PATCHES = """
import importlib, json, sys, warnings
def theirs():
    importlib.import_module("skyrl.backends.skyrl_train.inference_servers.layerwise_reload").patch_numel_loaded()
def ours():
    import ultra_patches
    importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
first, second = {order}
first(); second()
from vllm.model_executor.model_loader.reload import layerwise, meta
import ultra_patches
rows = {{row.id: [row.state.value, row.reason] for row in ultra_patches.status()}}
print()
print(json.dumps({{"rows": rows, "live": [layerwise.get_numel_loaded.__module__, meta.get_numel_loaded.__module__],
    "code": [f.get_numel_loaded.__code__.co_filename for f in (layerwise, meta)]}}))
"""


@pytest.mark.parametrize("order", ["ours, theirs", "theirs, ours"])
def test_skyrls_own_patch_is_named_and_stays(order: str) -> None:
    """The releases that patch `get_numel_loaded` themselves do it at the first weight update, without a look at the version."""
    skyrl = [releases.tree("skyrl", "0.3.0"), releases.tree("skyrl-gym", "0.4.0")]
    seen = run(SKYRL_PATCHES.format(order=order), path=skyrl)
    state, reason = seen["rows"]["vllm-reload-duplicate-weights"]
    assert state == "conflict"
    assert "layerwise_reload" in reason
    assert "get_numel_loaded" in reason
    assert all(file.endswith("layerwise_reload.py") for file in seen["code"]), "never overwritten"
    assert seen["rows"]["vllm-reload-keep-unsent"][0].startswith("applied"), "what they do not touch stays in force"


def test_verl_loads_the_overlay_by_itself() -> None:
    """By the entry point `verl.plugins`, which the package reads wherever it is imported."""
    tree = releases.tree("verl", "0.9.1")
    text = (tree / "verl" / "__init__.py").read_text()
    block = text[text.index("# Auto-discover plugins") : text.index('if os.getenv("VERL_USE_MODELSCOPE"')]
    code = f"import json, logging, os, sys\n{block}\nprint(json.dumps({{'armed': 'ultra_patches' in sys.modules}}))"
    assert run(code, path=[])["armed"]
    assert not run(code, path=[], VERL_USE_EXTERNAL_PLUGINS="none")["armed"]
