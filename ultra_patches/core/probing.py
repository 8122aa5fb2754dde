"""What probes see on the installed code, asked of a process of its own.

A probe must not depend on the state of the process that imports an upstream, such as a default dtype, and what it replaces for
its time must not be seen by the threads there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ultra_patches.core import facts
from ultra_patches.errors import one_line
from ultra_patches.patch import Finding, Patch, Verdict

#: Seconds that an import may wait for its probes.
LIMIT_S = 180.0
#: Imports what this process would import, whatever `site` and the folder of the child make of the path.
_START = (
    "import os, runpy, sys; sys.path[:] = {path!r}; os.environ['ULTRA_PATCHES'] = 'off'; sys.argv[1:] = {ids!r}; "
    "runpy.run_module('ultra_patches.proving.process', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class Probed:
    """What a probe saw, and the file of each module that it was seen on."""

    finding: Finding
    files: Mapping[str, str | None] = field(default_factory=dict)


def ask(patches: Sequence[Patch], limit_s: float = LIMIT_S) -> dict[str, Probed]:
    """Run the probes of patches that can share a process, without patches, as `ultra-patches verify` does.

    By id; inconclusive where the process does not answer within `limit_s` seconds.
    """
    ids = [patch.id for patch in patches]
    why = f"no answer within {limit_s:.0f} s"
    try:
        output, ended = _run(ids, limit_s)
        why = ended or why
    except (OSError, ValueError) as error:
        output, why = "", f"no process can be started for the probe ({one_line(error)})"
    found = _printed(output)
    return {one: found.get(one, Probed(Finding(Verdict.INCONCLUSIVE, why))) for one in ids}


def _run(ids: Sequence[str], limit_s: float) -> tuple[str, str | None]:
    """What the process printed, and how it ended; None where it was ended here."""
    if not sys.executable:
        raise ValueError("this program embeds Python")
    path = [os.path.abspath(entry) for entry in facts.search_path()]  # noqa: PTH100 # resolve() would follow links
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ULTRA_PATCHES")}
    command = [sys.executable, "-W", "ignore", "-c", _START.format(path=path, ids=list(ids))]
    # Not pipes, which a process that a probe has left behind would hold open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            env={**environ, "ULTRA_PATCHES": "off"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        ended: str | None = None
        try:
            code = child.wait(limit_s)
            errors.seek(0)
            tail = (errors.read().decode(errors="replace").strip().splitlines() or ["nothing printed"])[-1]
            ended = f"the process ended with {code}: {tail}"
        except subprocess.TimeoutExpired:
            pass
        finally:
            if child.returncode is None:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        return output.read().decode(errors="replace"), ended


def _printed(output: str) -> dict[str, Probed]:
    found: dict[str, Probed] = {}
    for line in output.splitlines():
        if line.startswith('{"id": '):
            with contextlib.suppress(ValueError, KeyError):
                said: dict[str, Any] = json.loads(line)
                finding = Finding(Verdict(said["verdict"]), str(said["detail"]))
                found[said["id"]] = Probed(finding, said.get("files") or {})
    return found
