"""Releases as ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence


def spans(order: Sequence[str], chosen: Iterable[str]) -> str:
    """Some of the releases in `order`, oldest first, for instance `0.16.0 to 0.23.0, 0.25.0`; empty where none is chosen."""
    at = sorted(order.index(release) for release in chosen)
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(at), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(order[r[0]] if len(r) == 1 else f"{order[r[0]]} to {order[r[-1]]}" for r in runs)
