"""A converted adapter in a real vLLM server on CPU: it is listed, and gives what the merged model gives."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("megatron")

from examples.convert_lora import convert
from examples.grpo.cpu_preset import tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.upstream, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROMPT = [10, 20, 30, 40, 50, 60, 70, 80]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Widths that vLLM's attention has on CPUs. Its mixture of experts without a gate, as NemotronH's, it has on GPUs only.
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"model": "qwen3", "head_dim": 32},
    "nemotron_h": {"model": "nemotron_h", "pattern": "M*-"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a case: `base`, `adapter` and `merged`, the last two from Megatron's adapters."""
    root = tmp_path_factory.mktemp("served")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    found = subprocess.run(
        [*launcher, "tests/lora/lora_case.py", str(root), json.dumps(CASES)],
        check=False,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    for name in CASES:
        case = root / name
        convert(case / "checkpoint", case / "base", case / "adapter")
        shutil.copy(case / "base" / "config.json", case / "merged")
        for model in ("base", "merged"):
            tokenizer().save_pretrained(case / model)
    return root


@contextlib.contextmanager
def serving(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The address of an OpenAI server of vLLM; the whole of it has ended when the block is left."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    options = {"--host": "127.0.0.1", "--port": port, "--dtype": "float32", "--max-model-len": 64}
    words = [str(word) for option in options.items() for word in option]
    with log.open("w") as lines:
        process = subprocess.Popen(
            [*command, *words, "--served-model-name", "base", "--enforce-eager", *arguments],
            env={**os.environ, **ENVIRONMENT},
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while not answers(f"{address}/health"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def ask(address: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=120) as response:
        found: dict[str, Any] = json.loads(response.read())
    return found


def logprobs(address: str, model: str) -> list[float]:
    """Of each token of the prompt but the first, in nats."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    entries = ask(f"{address}/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry[str(token)]["logprob"] for token, entry in zip(PROMPT[1:], entries[1:], strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_is_listed_and_gives_what_the_merged_model_gives(made: Path, tmp_path: Path, name: str) -> None:
    case = made / name
    adapter = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={case / 'adapter'}")
    with serving(case / "base", tmp_path / "base.log", *adapter) as address:
        listed = {model["id"]: model for model in ask(f"{address}/v1/models")["data"]}
        base, tuned = logprobs(address, "base"), logprobs(address, "tuned")
    assert set(listed) == {"base", "tuned"}
    assert listed["tuned"]["parent"] == "base"
    with serving(case / "merged", tmp_path / "merged.log") as address:
        merged = logprobs(address, "base")
    assert tuned == pytest.approx(merged, abs=1e-3)
    # An adapter whose names match nothing loads as well, and changes nothing.
    assert max(abs(one - other) for one, other in zip(tuned, base, strict=True)) > 0.05
