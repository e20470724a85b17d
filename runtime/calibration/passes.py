"""Does a machine give the same answer twice?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError

Progress = Callable[[float, str], None]
Values = NDArray[np.float64]

TOLERANCE = 0.20
TRIES = 3


class CalibrationError(MemboundError):
    """The machine did not give the same answer twice."""


@dataclass
class Part:
    """One thing that is measured in passes: `measure` yields `count` values, of which less is better.

    A value that could not be measured is NaN.
    """

    name: str
    count: int
    measure: Callable[[], Iterator[float]]
    passes: list[Values] = field(default_factory=list)

    def difference(self) -> float:
        """The relative difference of the two passes that are most alike, as the median over their values."""
        pairs = combinations(self.passes, 2)
        return min(float(np.nanmedian(np.maximum(a, b) / np.minimum(a, b))) - 1 for a, b in pairs)

    def typical(self) -> Values:
        """Each value's mean over the passes, without those that were disturbed: a fifth above the least or more."""
        passes = np.array(self.passes)
        least = np.fmin.reduce(passes)
        calm = np.where(passes <= least * (1 + TOLERANCE), passes, np.nan)
        counts = np.maximum(np.sum(np.isfinite(calm), axis=0), 1)
        typical: Values = np.where(np.isfinite(least), np.nansum(calm, axis=0) / counts, np.nan)
        return typical

    def best(self) -> Values:
        """The least of each value: what a roof must not lie above."""
        best: Values = np.fmin.reduce(self.passes)
        return best


def repeat(parts: Sequence[Part], progress: Progress) -> float:
    """Measures every part twice, those that differ again, and returns the largest difference that was left.

    Raises CalibrationError where a part never repeats.
    """
    total = 2 * sum(part.count for part in parts)
    done = 0
    for number in (1, 2):
        for part in parts:
            _measure(part, f"{part.name}, pass {number} of 2", done, total, progress)
            done += part.count
    for attempt in range(2, TRIES + 1):
        for part in parts:
            if part.difference() > TOLERANCE:
                _measure(part, f"{part.name} again, attempt {attempt} of {TRIES}", total, total, progress)
    worst = max(parts, key=lambda part: part.difference())
    if worst.difference() > TOLERANCE:
        raise CalibrationError(
            f"two measurements of {worst.name} differ by {worst.difference():.0%}, more than {TOLERANCE:.0%}, "
            f"even after {TRIES} attempts; close other programs and run `membound calibrate` again"
        )
    return worst.difference()


def _measure(part: Part, text: str, done: int, total: int, progress: Progress) -> None:
    values: list[float] = []
    for value in part.measure():
        progress(min(1.0, (done + len(values)) / total), text)
        values.append(value)
    part.passes.append(np.array(values))
