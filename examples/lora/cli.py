"""What the commands share: one line for an error, and a progress bar on stderr."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from examples.grpo.errors import RunError


def run(work: Callable[[], None]) -> int:
    """0, or 1 with the error's line on stderr."""
    try:
        work()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[Sequence[Any]], Iterable[Any]]]:
    """A bar that is gone at the end; gives what a sequence is looped over with."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield lambda items: bar.track(items, description=text)
