"""Does a machine give the same answer twice?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.hardware.calibration import one_state
from membound.roofline.progress import Progress
from membound.runtime.calibration.memory_watch import MemoryWatch

Values = NDArray[np.float64]

TOLERANCE = 0.20
PASSES = 2
TRIES = 3
PATIENCE_S = 10.0  # before a part is measured again, until memory is as it was


class CalibrationError(MemboundError):
    """The machine did not give the same answer twice."""


@dataclass
class Part:
    """One thing that is measured in passes: `measure` yields `count` values, of which less is better.

    A value that could not be measured is NaN. `rates` has what memory gave before and after each pass, where that is
    watched, and `state` what it must have given for a pass to count.
    """

    name: str
    count: int
    measure: Callable[[], Iterator[float]]
    passes: list[Values] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)
    state: float | None = None

    def in_state(self) -> list[Values]:
        """The passes during which memory gave what `state` says."""
        return [one for one, rates in zip(self.passes, self.rates, strict=True) if self._within(rates)]

    def difference(self) -> float:
        """The relative difference of the two passes that are most alike, as the median over their values."""
        return _difference(self._counted())

    def typical(self) -> Values:
        """Each value's mean over the passes, without those that were disturbed: a fifth above the least or more."""
        passes = np.array(self._counted())
        least = np.fmin.reduce(passes)
        calm = np.where(passes <= least * (1 + TOLERANCE), passes, np.nan)
        counts = np.maximum(np.sum(np.isfinite(calm), axis=0), 1)
        typical: Values = np.where(np.isfinite(least), np.nansum(calm, axis=0) / counts, np.nan)
        return typical

    def best(self) -> Values:
        """The least of each value: what a roof must not lie above."""
        best: Values = np.fmin.reduce(self._counted())
        return best

    def _within(self, rates: tuple[float, ...]) -> bool:
        return self.state is None or all(one_state(rate, self.state) for rate in rates)

    def _counted(self) -> list[Values]:
        """Those in the state, or all where two of these could not be had or are not alike."""
        within = self.in_state()
        return within if len(within) >= PASSES and _difference(within) <= TOLERANCE else self.passes


@dataclass(frozen=True)
class Repeated:
    """How alike the passes are, what memory gave in those that count, and the parts that lack two such passes."""

    difference: float
    memory_rate: float | None
    unsettled: tuple[str, ...]


def repeat(
    parts: Sequence[Part], progress: Progress, watch: MemoryWatch | None = None, more_time: float = 1.0
) -> Repeated:
    """Measures every part twice, and again those that differ or during which memory was not as mostly.

    What memory has repeated takes up to `more_time` of what the two passes took.
    Raises CalibrationError where a part never repeats.
    """
    total = PASSES * sum(part.count for part in parts)
    done = 0
    start_s = time.perf_counter()
    for number in (1, 2):
        for part in parts:
            _measure(part, f"{part.name}, pass {number} of 2", done, total, progress, watch)
            done += part.count
    if watch is not None:
        _settle(parts, progress, watch, more_time * (time.perf_counter() - start_s))
    for attempt in range(PASSES, TRIES + 1):
        for part in parts:
            if part.difference() > TOLERANCE:
                if watch is not None and part.state is not None:
                    watch.settled(part.state, PATIENCE_S)
                text = f"{part.name} again, attempt {attempt} of {TRIES}"
                _measure(part, text, total, total, progress, watch)
    worst = max(parts, key=lambda part: part.difference())
    if worst.difference() > TOLERANCE:
        raise CalibrationError(
            f"two measurements of {worst.name} differ by {worst.difference():.0%}, more than {TOLERANCE:.0%}, "
            f"even after {TRIES} attempts; close other programs and run `membound calibrate` again"
        )
    return Repeated(worst.difference(), parts[0].state, tuple(part.name for part in parts if _lacking(part)))


def _settle(parts: Sequence[Part], progress: Progress, watch: MemoryWatch, allowed_s: float) -> None:
    """Says in which state of memory passes count, and for `allowed_s` repeats what lacks passes in it.

    Where most passes were in no common one, other programs disturb memory all the time, and all passes count.
    """
    all_rates = [rates for part in parts for rates in part.rates]
    state = max((before for before, _ in all_rates), key=lambda rate: _passes_at(rate, all_rates))
    if 2 * _passes_at(state, all_rates) < len(all_rates):
        return
    for part in parts:
        part.state = state
    end_s = time.perf_counter() + allowed_s
    while lacking := [part for part in parts if _lacking(part)]:
        for part in lacking:
            if (left_s := end_s - time.perf_counter()) <= 0:
                return
            text = f"{part.name} again, when memory gives {state / 1e9:.0f} GB/s as before"
            progress(1.0, text)
            watch.settled(state, min(PATIENCE_S, left_s))
            _measure(part, text, 1, 1, progress, watch)


def _passes_at(rate: float, rates: Sequence[tuple[float, float]]) -> int:
    """Passes that began and ended while memory gave so many bytes/s."""
    return sum(one_state(rate, before) and one_state(rate, after) for before, after in rates)


def _difference(passes: Sequence[Values]) -> float:
    pairs = combinations(passes, 2)
    return min(float(np.nanmedian(np.maximum(a, b) / np.minimum(a, b))) - 1 for a, b in pairs)


def _lacking(part: Part) -> bool:
    return len(part.in_state()) < PASSES


def _measure(part: Part, text: str, done: int, total: int, progress: Progress, watch: MemoryWatch | None) -> None:
    before = watch.rate() if watch else 0.0
    values: list[float] = []
    for value in part.measure():
        progress(min(1.0, (done + len(values)) / total), text)
        values.append(value)
    part.passes.append(np.array(values))
    part.rates.append((before, watch.rate() if watch else 0.0))
