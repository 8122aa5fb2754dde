"""Ranks that are forked after slow imports. For scripts of tests."""

import contextlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = Callable[[int, int], Any]


def run(ranks: int, work: Work) -> list[Any]:
    """What `work(rank, port)` gives on each rank, by JSON. Raises RuntimeError with the first failure."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = {_fork(rank, port, Path(folder), work): rank for rank in range(ranks)}
        while children:
            child, status = os.waitpid(-1, 0)
            rank = children.pop(child, None)
            if rank is not None and status:
                # The others would wait for it.
                for other in children:
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
                error = Path(folder, f"{rank}.error")
                raise RuntimeError(error.read_text() if error.is_file() else f"rank {rank} ended with {status}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _fork(rank: int, port: int, folder: Path, work: Work) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            seen = work(rank, port)
        (folder / f"{rank}.json").write_text(json.dumps(seen))
        status = 0
    except BaseException as error:  # noqa: BLE001 # a fork that returned would run the rest of the parent
        (folder / f"{rank}.error").write_text("".join(traceback.format_exception(error)))
    sys.stderr.flush()
    os._exit(status)
