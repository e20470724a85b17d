"""At which amounts are step times tabulated, and how are they interpolated between?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from membound.roofline.shape import StepShape

Column = NDArray[np.float64]
# Seconds of the device, and of waiting for the host, of a step or of each of many.
Split = Callable[[StepShape], tuple[Column, Any]]
# Attended tokens from which on and up to which a time is linear, seconds there, and how many more each token takes.
Piece = tuple[float, float, float, float]
NOWHERE: Piece = (0.0, 0.0, 0.0, 0.0)

# Tokens of one sequence at which steps of decode are tabulated: four to an octave.
CONTEXTS = np.unique(np.round(2.0 ** np.arange(0, 23.01, 0.25)))
# Numbers of sequences that are tabulated together.
NEAR = 16


def decode_grid(sequences: int) -> tuple[list[int], StepShape]:
    """Numbers of sequences near one, and steps of decode of each at all contexts, one row of them after the other."""
    near = near_ones(sequences)
    n = np.repeat(np.array(near, dtype=np.float64), len(CONTEXTS))
    kv_tokens = n * np.tile(CONTEXTS, len(near))
    return near, StepShape(n, n, kv_tokens, kv_tokens, n)


def near_ones(sequences: int) -> list[int]:
    """The numbers of sequences that are tabulated together with one."""
    first = (sequences - 1) // NEAR * NEAR + 1
    return list(range(first, first + NEAR))


def place(axis: list[int], value: float) -> tuple[int, float]:
    """The index below `value`, and how far it is from there to the next."""
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def below(nodes: list[float], at: float) -> int:
    """The entry below `at`, with another behind it."""
    return min(max(bisect_right(nodes, at) - 1, 0), len(nodes) - 2)


def piece_of(begin: float, end: float, first: float, last: float) -> Piece:
    return begin, end, first, (last - first) / (end - begin)
