"""Wait until a Ray cluster has all its nodes: what the launch scripts do before the driver starts.

python -m examples.nemotron_ultra.cluster_ready HOST:PORT NODES [--timeout SECONDS]
"""

import argparse
import contextlib
import socket
import time
from collections.abc import Sequence

import ray

from examples.errors import RunError, reported


def wait(address: str, wanted: int, timeout_s: float) -> None:
    """Return when so many nodes are alive; RunError says how many came within `timeout_s` seconds."""
    until = time.monotonic() + timeout_s
    _connect(address, until, timeout_s)
    try:
        while len(alive := [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]) < wanted:
            if time.monotonic() > until:
                raise RunError(
                    f"{len(alive)} of {wanted} Ray nodes after {timeout_s:.0f} s ({', '.join(sorted(alive))}): see what "
                    "`ray start` said on the others"
                )
            time.sleep(0.5)
    finally:
        ray.shutdown()


def _connect(address: str, until: float, timeout_s: float) -> None:
    while time.monotonic() < until:
        if answers(address):
            try:
                ray.init(address, log_to_driver=False, logging_level="ERROR")
            except ConnectionError as error:
                if "AuthenticationError" in str(error.__cause__):
                    raise RunError(
                        f"the Ray head at {address} wants another token: see RAY_AUTH_MODE in Ray"
                    ) from error
            else:
                return
        time.sleep(0.5)
    raise RunError(f"no Ray head at {address} after {timeout_s:.0f} s: see what `ray start --head` said above")


def answers(address: str) -> bool:
    """Whether anything listens at `host:port`. Ray itself would take minutes to say that nothing does."""
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit():
        return False
    # No port goes beyond 65535, no name through IDNA that has an empty part.
    with (
        contextlib.suppress(OSError, OverflowError, UnicodeError),
        socket.create_connection((host, int(port)), timeout=5),
    ):
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when they are there, 1 with one line on stderr where they did not come."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address")
    parser.add_argument("nodes", type=int)
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    options = parser.parse_args(arguments)
    return reported(lambda: wait(options.address, options.nodes, options.timeout))


if __name__ == "__main__":
    raise SystemExit(main())
