"""A process that has imported what vLLM and Megatron need of others, and forks one for each script.

Importing torch and transformers takes four fifths of the time of most scripts. Nothing of an upstream and nothing of this
project is imported before the fork, so that a script sees its own releases. Environment, path and working directory are
those of the script alone.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

#: What takes long to import, and starts no thread.
MODULES = (
    "torch",
    "torch._inductor.lowering",
    "torch._inductor.compile_fx",
    "torch.distributed",
    "transformers",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "openai.types.responses.response_function_tool_call_output_item",
    "fastapi",
    "aiohttp",
)
UPSTREAMS = ("vllm", "megatron", "ultra_patches", "ray")
#: What is read when these modules are imported: it is the same for all scripts, or they do not come here.
READ_AT_IMPORT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Warm:
    """The server of this process, which runs one script at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={**os.environ, **READ_AT_IMPORT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A line that waits in a buffer would not be seen by select.
            bufsize=0,
        )
        self._lock = threading.Lock()

    def run(
        self, script: Path, arguments: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """What the script left. Raises subprocess.TimeoutExpired, with the script killed."""
        out, err = folder / "stdout", folder / "stderr"
        asked = {"script": str(script), "argv": [str(script), *arguments], "env": dict(env), "cwd": str(folder)}
        with self._lock:
            self._ask({**asked, "out": str(out), "err": str(err)})
            child = self._answer(60)
            status = self._answer(seconds)
            if status is None:
                os.killpg(int(child or 0), signal.SIGKILL)
                self._answer(60)
                raise subprocess.TimeoutExpired([str(script), *arguments], seconds)
        return subprocess.CompletedProcess([str(script), *arguments], status, out.read_text(), err.read_text())

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def _answer(self, seconds: float) -> int | None:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], seconds)[0]:
            return None
        line = stdout.readline()
        assert line, f"the process that forks ended with {self._process.poll()}"
        return int(line)


@cache
def server() -> Warm:
    """One for each process of a test run; it ends with it."""
    return Warm()


def _serve() -> None:
    for name in MODULES:
        importlib.import_module(name)
    early = sorted({name.partition(".")[0] for name in sys.modules} & set(UPSTREAMS))
    if early:
        raise SystemExit(f"{early} came with what is imported before the fork")
    tasks = len(list(Path("/proc/self/task").iterdir()))
    if tasks != 1:
        raise SystemExit(f"{tasks} threads run before the fork: a lock of theirs would never be released in a script")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(asked: dict[str, Any]) -> None:
    """Be the process of a script, as far as its end."""
    status = 1
    try:
        os.setsid()
        for descriptor, path in ((1, asked["out"]), (2, asked["err"])):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        first = [str(Path(asked["script"]).parent), *asked["env"].get("PYTHONPATH", "").split(os.pathsep)]
        sys.path[:] = [*first, *(path for path in sys.path[1:] if path not in first)]
        importlib.invalidate_caches()
        sys.argv = asked["argv"]
        try:
            runpy.run_path(asked["script"], run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 # a fork that returned would serve as well
        traceback.print_exc()
    # As the interpreter's own end would: multiprocessing ends its children here.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
