"""What the commands share: a progress bar on stderr."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[Sequence[Any]], Iterable[Any]]]:
    """A bar that is gone at the end; gives what a sequence is looped over with."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield lambda items: bar.track(items, description=text)
