"""What ends a run with one line instead of a traceback."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RunError(Exception):
    """Says what was found, where, and what to do next. Each argument is a line of its own."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


def reported(work: Callable[[], None]) -> int:
    """The exit status of a command: 0, or 1 with the error's lines on stderr. What the system refuses is such a line too."""
    try:
        work()
    except RunError as error:
        found = error
    except OSError as error:
        found = RunError(f"{error.filename or 'output'}: {error.strerror or error}")
    else:
        return 0
    for line in found.args:
        print(f"error: {printable(str(line))}", file=sys.stderr)
    return 1


def printable(text: str) -> str:
    """The text on one line, without what moves a terminal's cursor: names come from files."""
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def first_line(error: BaseException) -> str:
    """What an error says first, or its kind where it says nothing."""
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0][:200]


def json_object(text: str | bytes, where: object, then: str) -> dict[str, Any]:
    """The JSON object that a file holds; RunError says where it is none, and what to do `then`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: not JSON ({first_line(error)}); {then}") from error
    if not isinstance(found, dict):
        raise RunError(f"{where}: no JSON object but {type(found).__name__}; {then}")
    return found


def json_file(path: Path, then: str) -> dict[str, Any]:
    """As `json_object`, of a file; a pipe or a device is none."""
    if not path.is_file():
        raise RunError(f"{path}: {'no file' if path.exists() else 'missing'}; {then}")
    try:
        return json_object(path.read_bytes(), path, then)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); {then}") from error
