"""How are random numbers drawn so that a run can be repeated and streamed?

Each purpose has its own stream, so that a change of one (more requests, another length distribution) leaves the others
as they were, and everything is drawn in chunks of fixed size, so that memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 8192


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random numbers of one purpose in the run of `seed`."""
    return np.random.default_rng([seed, *purpose.encode()])


class Column:
    """Chunks of one column, taken in pieces of any size."""

    def __init__(self, chunks: Iterator[NDArray[Any]]) -> None:
        self._chunks = chunks
        self._rest: NDArray[Any] | None = None

    def take(self, count: int) -> NDArray[Any]:
        """The next `count` values; fewer only where the column ends."""
        parts, missing = [], count
        while missing > 0:
            part = next(self._chunks, None) if self._rest is None else self._rest
            if part is None:
                break
            self._rest = part[missing:] if len(part) > missing else None
            parts.append(part[:missing])
            missing -= len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0)
