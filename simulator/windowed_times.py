"""How long does a step of decode take where some layers see no more than the end of each sequence?

Each layer's attention takes as long as what it sees of all sequences together: all tokens, or those within its window.
So the device's time is a sum of one part for each of these sums, and a part is tabulated over its own alone, while each
sequence has a token in the others. Two steps of the same sequences need not be equally far apart in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from membound.roofline.shape import StepShape
from membound.roofline.within import Within
from membound.simulator.tables import CONTEXTS, NEAR, Column, Piece, Split, below, piece_of

# More steps than any run of equal ones has.
_ENDLESS = 1 << 60


@cache
def contexts_of(window: int | None) -> NDArray[np.float64]:
    """Tokens seen of one sequence at which steps are tabulated: those up to a window, that itself, and one beyond."""
    if window is None:
        return CONTEXTS
    return np.concatenate((CONTEXTS[: np.searchsorted(CONTEXTS, window)], [window, 2.0 * window]))


def decode_shape(n: Any, windows: tuple[int, ...], kv_tokens: Any, seen: Sequence[Any]) -> StepShape:
    """A step of decode of n sequences that attend to so many tokens, of which layers with each window see so many."""
    within = tuple(Within(window, tokens) for window, tokens in zip(windows, seen, strict=True))
    return StepShape(n, n, kv_tokens, kv_tokens, n, within=within)


class _Axis:
    """A part's seconds over what its layers see of so many sequences together."""

    def __init__(self, tokens: list[float], seconds: list[float]) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._last = piece_of(*tokens[:2], *seconds[:2])  # the next step is near the last

    def piece_at(self, tokens: float) -> Piece:
        """Between the two entries around so many tokens, or beyond the last two."""
        piece = self._last
        if not piece[0] <= tokens < piece[1]:
            index = below(self._tokens, tokens)
            piece = self._last = piece_of(*self._tokens[index : index + 2], *self._seconds[index : index + 2])
        return piece


class WindowedTimes:
    """Seconds of steps of decode as sums of parts; `split` gives those of the device and of waiting for the host."""

    def __init__(self, split: Split, windows: tuple[int, ...]) -> None:
        self._split = split
        self._windows = windows
        self._axes: dict[int, list[_Axis]] = {}
        # Of each number of sequences seconds that a step always waits, and of launches that the device's must exceed.
        self._waits: dict[int, tuple[float, float]] = {}

    def device_s(self, sequences: int, kv_tokens: float, seen: Sequence[float]) -> float:
        """Seconds of the device in a step whose layers see so many tokens: all of them, or those of each window."""
        seconds = 0.0
        for axis, tokens in zip(self._axes_of(sequences), (kv_tokens, *seen), strict=True):
            begin, _, low, slope = axis.piece_at(tokens)
            seconds += low + slope * (tokens - begin)
        return seconds

    def equal_steps(
        self, sequences: int, kv_tokens: float, seen: Sequence[float], growing: Sequence[int]
    ) -> tuple[float, float, int]:
        """Seconds of a step, how much longer the next is, and how many are alike, as of each step `growing` more are
        seen within each window than of the one before."""
        device_s, slope_s, alike = 0.0, 0.0, _ENDLESS
        amounts, more = (kv_tokens, *seen), (sequences, *growing)
        for axis, tokens, grown in zip(self._axes_of(sequences), amounts, more, strict=True):
            begin, end, low, slope = axis.piece_at(tokens)
            device_s += low + slope * (tokens - begin)
            if grown:
                slope_s += slope * grown
                alike = min(alike, 1 + int((end - tokens) // grown))
        wait_s, launch_s = self._waits[sequences]
        if device_s >= launch_s:
            return device_s + wait_s, slope_s, alike
        if slope_s > 0:  # until the device takes longer than the launches, on which it waits
            alike = min(alike, 1 + int((launch_s - device_s) / slope_s))
        return launch_s + wait_s, 0.0, alike

    def _axes_of(self, sequences: int) -> list[_Axis]:
        if sequences not in self._axes:
            self._tabulate(sequences)
        return self._axes[sequences]

    def _tabulate(self, sequences: int) -> None:
        """Tables of this number of sequences and of those near it, which cost hardly more than one."""
        first = (sequences - 1) // NEAR * NEAR + 1
        near = np.arange(first, first + NEAR, dtype=np.float64)
        tables = [self._table(near, part) for part in range(1 + len(self._windows))]
        one = np.ones(len(near))
        _, wait_s = self._split(decode_shape(near, self._windows, near * 1e6, [near] * len(self._windows)))
        device_s, small_wait_s = self._split(decode_shape(near, self._windows, near, [near] * len(self._windows)))
        wait_s, launch_s = wait_s * one, (device_s + small_wait_s - wait_s) * one
        for index, n in enumerate(range(first, first + NEAR)):
            self._axes[n] = [_Axis((contexts * n).tolist(), rows[index].tolist()) for contexts, rows in tables]
            self._waits[n] = float(wait_s[index]), float(launch_s[index])

    def _table(self, near: Column, part: int) -> tuple[Column, Column]:
        """Tokens of one sequence, and seconds of each number of them: of the whole where the first part grows, and
        what each of the others adds."""
        contexts = contexts_of((None, *self._windows)[part])
        n = np.repeat(near, len(contexts))
        amounts = [n] * (1 + len(self._windows))
        amounts[part] = n * np.tile(contexts, len(near))
        kv_tokens, *seen = amounts
        device_s, _ = self._split(decode_shape(n, self._windows, kv_tokens, seen))
        rows = np.broadcast_to(device_s, n.shape).reshape(len(near), -1)
        return contexts, rows if part == 0 else rows - rows[:, :1]


class CoupledTimes:
    """Seconds of steps of decode where no part stands alone, between costed ones: caches hold what all layers read, or
    one half of a batch hides the messages of the other."""

    def __init__(self, exact: Callable[[StepShape], Any], windows: tuple[int, ...]) -> None:
        self._exact = exact
        self._windows = windows
        self._known: dict[tuple[int, ...], float] = {}

    def seconds(self, sequences: int, kv_tokens: float, seen: Sequence[float]) -> float:
        places = []
        for window, tokens in zip((None, *self._windows), (kv_tokens, *seen), strict=True):
            contexts, each = contexts_of(window), tokens / sequences
            index = min(max(int(np.searchsorted(contexts, each, side="right")) - 1, 0), len(contexts) - 2)
            beyond = float((each - contexts[index]) / (contexts[index + 1] - contexts[index]))
            places.append(((index, 1.0 - beyond), (index + 1, beyond)))
        return sum(
            weight * self._at(sequences, tuple(index for index, _ in corner))
            for corner in product(*places)
            if (weight := prod(share for _, share in corner))
        )

    def _at(self, sequences: int, indexes: tuple[int, ...]) -> float:
        key = (sequences, *indexes)
        if key not in self._known:
            axes = zip((None, *self._windows), indexes, strict=True)
            kv_tokens, *seen = (float(sequences * contexts_of(window)[index]) for window, index in axes)
            shape = decode_shape(float(sequences), self._windows, kv_tokens, seen)
            self._known[key] = float(self._exact(shape))
        return self._known[key]
