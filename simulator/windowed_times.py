"""How long does a step of decode take where some layers see no more than the end of each sequence?

Each layer's attention takes as long as what it sees of all sequences together: all tokens, or those within its window.
So the device's time is a sum of one part for each of these sums, and a part is tabulated over its own alone, while each
sequence has a token in the others. Two steps of the same sequences need not be equally far apart in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from membound.roofline.shape import StepShape
from membound.roofline.within import Within
from membound.simulator.scheduling.reach import ENDLESS
from membound.simulator.tables import CONTEXTS, Column, Piece, Split, below, near_ones, piece_of


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
        self.last = piece_of(*tokens[:2], *seconds[:2])  # the next step is near the last

    def move_to(self, tokens: float) -> Piece:
        """Makes the piece around so many tokens the last one, that of the last two entries where they are more."""
        index = below(self._tokens, tokens)
        self.last = piece_of(*self._tokens[index : index + 2], *self._seconds[index : index + 2])
        return self.last


class WindowedTimes:
    """Seconds of steps of decode as sums of parts; `split` gives those of the device and of waiting for the host."""

    def __init__(self, split: Split, windows: tuple[int, ...]) -> None:
        self._split = split
        self._windows = windows
        # Of each number of sequences its parts, and seconds that a step always waits and of launches that the device's
        # must exceed.
        self._known: dict[int, tuple[list[_Axis], float, float]] = {}

    def device_s(self, sequences: int, kv_tokens: float, seen: Sequence[float]) -> float:
        """Seconds of the device in a step whose layers see so many tokens: all of them, or those of each window."""
        if sequences not in self._known:
            self._tabulate(sequences)
        seconds, tokens = 0.0, kv_tokens
        for index, axis in enumerate(self._known[sequences][0]):
            if index:
                tokens = seen[index - 1]
            begin, end, low, slope = axis.last
            if not begin <= tokens < end:
                begin, _, low, slope = axis.move_to(tokens)
            seconds += low + slope * (tokens - begin)
        return seconds

    def equal_steps(
        self, sequences: int, kv_tokens: float, seen: Sequence[float], growing: Sequence[int]
    ) -> tuple[float, float, int]:
        """Seconds of a step, how much longer the next is, and how many are alike, as of each step `growing` more are
        seen within each window than of the one before."""
        if sequences not in self._known:
            self._tabulate(sequences)
        axes, wait_s, launch_s = self._known[sequences]
        device_s, slope_s, alike = 0.0, 0.0, float(ENDLESS)
        tokens, more = kv_tokens, sequences
        for index, axis in enumerate(axes):
            if index:
                tokens, more = seen[index - 1], growing[index - 1]
            begin, end, low, slope = axis.last
            if not begin <= tokens < end:
                begin, end, low, slope = axis.move_to(tokens)
            device_s += low + slope * (tokens - begin)
            if more:
                slope_s += slope * more
                left = (end - tokens) // more
                if left < alike:
                    alike = left
        if device_s >= launch_s:
            return device_s + wait_s, slope_s, 1 + int(alike)
        if slope_s > 0:  # until the device takes longer than the launches, on which it waits
            alike = min(alike, (launch_s - device_s) // slope_s)
        return launch_s + wait_s, 0.0, 1 + int(alike)

    def _tabulate(self, sequences: int) -> None:
        """Tables of this number of sequences and of those near it, which cost hardly more than one."""
        near = near_ones(sequences)
        each = self._seen_by_one
        n = np.repeat(np.array(near, dtype=np.float64), len(each))
        kv_tokens, *seen = (n * np.tile(column, len(near)) for column in each.T)
        device_s, wait_s = (
            np.broadcast_to(split_s, n.shape).reshape(len(near), -1)
            for split_s in self._split(decode_shape(n, self._windows, kv_tokens, seen))
        )
        # What the first part's last entry waits no launch can take; its first entry is the shortest step of all.
        parts = list(pairwise(np.cumsum([0, *map(len, self._contexts)])))
        for count, own_s, waited_s in zip(near, device_s, wait_s, strict=True):
            always_s = float(waited_s[parts[0][1] - 1])
            axes = []
            for contexts, (begin, end) in zip(self._contexts, parts, strict=True):
                added_s = own_s[begin:end] - (own_s[begin] if begin else 0.0)
                axes.append(_Axis((contexts * count).tolist(), added_s.tolist()))
            self._known[count] = axes, always_s, float(own_s[0] + waited_s[0]) - always_s

    @cached_property
    def _contexts(self) -> list[Column]:
        return [contexts_of(window) for window in (None, *self._windows)]

    @cached_property
    def _seen_by_one(self) -> Column:
        """What layers see of one sequence, all of them and those with each window, at all entries of every part: a
        token, but for the part whose entry it is."""
        seen = np.ones((sum(map(len, self._contexts)), len(self._contexts)))
        end = 0
        for part, contexts in enumerate(self._contexts):
            begin, end = end, end + len(contexts)
            seen[begin:end, part] = contexts
        return seen


class CoupledTimes:
    """Seconds of steps of decode where no part stands alone, between costed ones: caches hold what all layers read, or
    one half of a batch hides the messages of the other."""

    def __init__(self, exact: Callable[[StepShape], Any], windows: tuple[int, ...]) -> None:
        self._exact = exact
        self._windows = windows
        self._known: dict[tuple[int, ...], float] = {}

    def equal_steps(
        self, sequences: int, kv_tokens: float, seen: Sequence[float], growing: Sequence[int]
    ) -> tuple[float, float, int]:
        """As of `WindowedTimes`, one step at a time: times that are not sums of parts bend between two entries."""
        return self.seconds(sequences, kv_tokens, seen), 0.0, 1

    def seconds(self, sequences: int, kv_tokens: float, seen: Sequence[float]) -> float:
        """Seconds of a step whose layers see so many tokens: all of them, or those of each window."""
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
