"""A checkpoint folder with four shards, and the real commands of the recipes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SHARDS = [f"model-{index:05}-of-00004.safetensors" for index in range(1, 5)]
#: A raylet of a loaded machine takes longer than Ray's 30 s.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A whole model as a mirror has it."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = tmp_path / "mirror"
    folder.mkdir()
    rows = np.random.default_rng(0)
    for number, name in enumerate(SHARDS):
        safetensors.save_file({f"w{number}": rows.random((64, 256), dtype=np.float32)}, folder / name)
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "nemotron_h"}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_nemotron_h.py").write_text("# custom code\n")
    (folder / "README.md").write_text("the page of the model\n")
    return folder


@pytest.fixture
def stage() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command to its end."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "examples.nemotron_ultra.stage", *map(str, arguments)]
        return subprocess.run(
            command, check=False, cwd=ROOT, env={**os.environ, **RAY_ENVIRONMENT, **environment}, capture_output=True,
            text=True,
        )  # fmt: skip

    return run


def error(found: subprocess.CompletedProcess[str]) -> str:
    """The one error of a command that failed."""
    assert found.returncode == 1, found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    lines = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, found.stderr
    return lines[0]
