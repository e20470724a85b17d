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
PATIENCE_S = 10.0  # before something is measured again, until memory is as it was
WATCH_EVERY_S = 0.25
MOST_ELSEWHERE = 0.1  # of a part's values may have been measured in another state of memory
FEWEST_IN_STATE = 0.4  # of all values, for a state to be this machine's usual one


class CalibrationError(MemboundError):
    """The machine did not give the same answer twice."""


@dataclass
class Part:
    """One thing that is measured in passes: `measure` yields `count` values, of which less is better.

    A value that could not be measured is NaN. `rates` has what memory gave before and after each value [count, 2],
    where that is watched, and `state` what it must have given for a value to count.
    """

    name: str
    count: int
    measure: Callable[[], Iterator[float]]
    passes: list[Values] = field(default_factory=list)
    rates: list[Values] = field(default_factory=list)
    state: float | None = None

    @property
    def lacking(self) -> bool:
        """Whether more than a few of its values were not measured twice while memory gave what `state` says."""
        samples = np.isfinite(self._in_state()).sum(axis=0)
        measurable = np.isfinite(np.array(self.passes)).any(axis=0)
        return bool(np.sum(measurable & (samples < PASSES)) > MOST_ELSEWHERE * self.count)

    def difference(self) -> float:
        """The relative difference of the two passes that are most alike, as the median over their values."""
        return _difference(self._counted())

    def typical(self) -> Values:
        """Each value's mean over the passes, without those that were disturbed: a fifth above the least or more."""
        passes = self._counted()
        least = np.fmin.reduce(passes)
        calm = np.where(passes <= least * (1 + TOLERANCE), passes, np.nan)
        counts = np.maximum(np.sum(np.isfinite(calm), axis=0), 1)
        typical: Values = np.where(np.isfinite(least), np.nansum(calm, axis=0) / counts, np.nan)
        return typical

    def best(self) -> Values:
        """The least of each value: what a roof must not lie above."""
        best: Values = np.fmin.reduce(self._counted())
        return best

    def _in_state(self) -> Values:
        """All passes [passes, count], NaN where memory did not give what `state` says."""
        passes = np.array(self.passes)
        if self.state is None:
            return passes
        within: Values = np.where(_at(self.state, np.array(self.rates)), passes, np.nan)
        return within

    def _counted(self) -> Values:
        """Those in the state, and of a value without any all; all of all where those in the state are not alike."""
        passes, within = np.array(self.passes), self._in_state()
        if _difference(within) > TOLERANCE:
            return passes
        counted: Values = np.where(np.isfinite(within).any(axis=0), within, passes)
        return counted


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
                text = f"{part.name} again, attempt {attempt} of {TRIES}"
                _measure(part, text, total, total, progress, watch, time.perf_counter() + PATIENCE_S)
    worst = max(parts, key=lambda part: part.difference())
    if worst.difference() > TOLERANCE:
        raise CalibrationError(
            f"two measurements of {worst.name} differ by {worst.difference():.0%}, more than {TOLERANCE:.0%}, "
            f"even after {TRIES} attempts; close other programs and run `membound calibrate` again"
        )
    return Repeated(worst.difference(), parts[0].state, tuple(part.name for part in parts if part.lacking))


def _settle(parts: Sequence[Part], progress: Progress, watch: MemoryWatch, allowed_s: float) -> None:
    """Says in which state of memory values count, and for `allowed_s` repeats what lacks values in it.

    Where too few were in any common one, other programs disturb memory all the time, and all count.
    """
    rates = np.concatenate([one for part in parts for one in part.rates])
    within = max((_at(rate, rates) for rate in np.unique(rates[:, 0])), key=np.sum)
    if np.mean(within) < FEWEST_IN_STATE:
        return
    state = float(np.median(rates[within]))
    for part in parts:
        part.state = state
    end_s = time.perf_counter() + allowed_s
    while lacking := [part for part in parts if part.lacking]:
        for part in lacking:
            if time.perf_counter() >= end_s:
                return
            text = f"{part.name} again, when memory gives {state / 1e9:.0f} GB/s as before"
            progress(1.0, text)
            _measure(part, text, 1, 1, progress, watch, end_s)


def _at(rate: float, rates: Values) -> NDArray[np.bool_]:
    """Where the rates before and after [..., 2] are of one state with `rate`."""
    return np.all(one_state(rates, rate), axis=-1)


def _difference(passes: Values) -> float:
    """Of the two passes that are most alike; infinite where no two share values."""
    pairs = [np.maximum(a, b) / np.minimum(a, b) for a, b in combinations(passes, 2)]
    return min((float(np.nanmedian(pair)) - 1 for pair in pairs if np.isfinite(pair).any()), default=np.inf)


def _measure(
    part: Part,
    text: str,
    done: int,
    total: int,
    progress: Progress,
    watch: MemoryWatch | None,
    patient_until_s: float = 0.0,
) -> None:
    """A pass; with a state to be in, memory is waited for on the way until then, each time `PATIENCE_S` at most."""
    values: list[float] = []
    rates: list[tuple[float, float]] = []
    for value in part.measure() if watch is None else _watched(part, watch, rates, patient_until_s):
        progress(min(1.0, (done + len(values)) / total), text)
        values.append(value)
    part.passes.append(np.array(values))
    part.rates.append(np.array(rates or [(0.0, 0.0)] * len(values)))


def _watched(
    part: Part, watch: MemoryWatch, rates: list[tuple[float, float]], patient_until_s: float
) -> Iterator[float]:
    """The values of a pass; `rates` takes what memory gave before and after each, which those of a moment share."""
    values, more, rate = part.measure(), True, watch.rate()
    while more:
        if part.state is not None and not one_state(rate, part.state):
            watch.settled(part.state, min(PATIENCE_S, max(0.0, patient_until_s - time.perf_counter())))
            rate = watch.rate()
        chunk: list[float] = []
        more, end_s = False, time.perf_counter() + WATCH_EVERY_S
        for value in values:
            chunk.append(value)
            if more := time.perf_counter() > end_s:
                break
        before, rate = rate, watch.rate()
        rates += [(before, rate)] * len(chunk)
        yield from chunk
