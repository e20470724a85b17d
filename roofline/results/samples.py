"""What is the distribution of many latencies, of which equal or evenly growing ones are kept as one?"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

Column = NDArray[np.float64]

# Values that are looked at together; memory stays bounded whatever the number of samples.
_CHUNK = 1 << 20
_BIN_BITS = 14


class Samples:
    """Weighted ramps: `count` values from `first` on, each `slope` more than the one before, `weight` times each.

    A sequence of equal engine steps gives each of its sequences such latencies, so a ramp stands for many tokens.
    """

    def __init__(self) -> None:
        self._ramps = array("d")

    @classmethod
    def of(cls, values: ArrayLike) -> Samples:
        """Single values."""
        samples = cls()
        for value in np.asarray(values, dtype=np.float64).ravel().tolist():
            samples.add(value)
        return samples

    def to_array(self) -> Column:
        """All ramps, to be read by `from_array`."""
        return np.array(self._ramps, dtype=np.float64)

    @classmethod
    def from_array(cls, ramps: Column) -> Samples:
        """The samples that `to_array` wrote."""
        samples = cls()
        samples.add_ramps(ramps)
        return samples

    def add(self, first: float, weight: float = 1.0, count: int = 1, slope: float = 0.0) -> None:
        """Adds a ramp."""
        self._ramps.extend((first, slope, count, weight))

    def add_ramps(self, ramps: Column) -> None:
        """Adds rows of (first, slope, count, weight)."""
        self._ramps.frombytes(ramps.tobytes())

    def extend(self, other: Samples) -> None:
        """Adds all of `other`."""
        self._ramps.extend(other._ramps)

    def __len__(self) -> int:
        """The number of values, each as often as it weighs."""
        _, _, count, weight = self._columns()
        return int(np.sum(count * weight))

    @property
    def mean(self) -> float | None:
        """None without samples."""
        first, slope, count, weight = self._columns()
        total = np.sum(count * weight)
        return float(np.sum(weight * count * (first + slope * (count - 1) / 2)) / total) if total else None

    def percentiles(self, percents: Iterable[float]) -> list[float | None]:
        """By linear interpolation between the sorted values, each as often as it weighs, as numpy does it."""
        total = len(self)
        wanted = [percent / 100 * (total - 1) for percent in percents]
        if not total:
            return [None for _ in wanted]
        ranks = sorted({rank for place in wanted for rank in (int(place), min(int(place) + 1, total - 1))})
        at = dict(zip(ranks, self._ranked(ranks), strict=True))
        found: list[float | None] = []
        for place in wanted:
            low, high = at[int(place)], at[min(int(place) + 1, total - 1)]
            found.append(low + (high - low) * (place - int(place)))
        return found

    def values(self) -> Column:
        """Every value as often as it weighs, in no order; for small runs."""
        parts = [np.repeat(values, weights.astype(np.int64)) for values, weights in self._chunks()]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _ranked(self, ranks: list[int]) -> list[float]:
        """The values at `ranks` of all sorted values: counted in bins, of which those that matter are then sorted.

        A ramp within one bin is counted as a whole, so that most are never written out.
        """
        first, slope, count, weight = self._columns()
        from_key, to_key = _keys(first), _keys(first + slope * (count - 1))
        low, high = int(min(from_key.min(), to_key.min())), int(max(from_key.max(), to_key.max()))
        shift = max(0, (high - low).bit_length() - _BIN_BITS)
        lowest_bin, bins = low >> shift, (high >> shift) - (low >> shift) + 1
        from_bin, to_bin = (from_key >> shift) - lowest_bin, (to_key >> shift) - lowest_bin
        inside = from_bin == to_bin
        masses = np.zeros(bins)
        masses += np.bincount(from_bin[inside], (count * weight)[inside], bins)
        for values, weights in self._chunks(~inside):
            masses += np.bincount((_keys(values) >> shift) - lowest_bin, weights, bins)
        below = np.concatenate(([0.0], np.cumsum(masses)))
        found_bins = (np.searchsorted(below, ranks, side="right") - 1).tolist()
        kept: dict[int, tuple[Column, Column]] = {}
        for found in set(found_bins):
            reaches = (np.minimum(from_bin, to_bin) <= found) & (found <= np.maximum(from_bin, to_bin))
            parts = []
            for values, weights in self._chunks(reaches):
                there = (_keys(values) >> shift) - lowest_bin == found
                parts.append((values[there], weights[there]))
            values, weights = (np.concatenate(columns) for columns in zip(*parts, strict=True))
            order = np.argsort(values, kind="stable")
            kept[found] = values[order], below[found] + np.cumsum(weights[order])
        ranked = []
        for rank, found in zip(ranks, found_bins, strict=True):
            values, reached = kept[found]
            ranked.append(float(values[np.searchsorted(reached, rank, side="right")]))
        return ranked

    def _columns(self) -> tuple[Column, Column, Column, Column]:
        table = np.frombuffer(self._ramps, dtype=np.float64).reshape(-1, 4) if self._ramps else np.zeros((0, 4))
        return table[:, 0], table[:, 1], table[:, 2], table[:, 3]

    def _chunks(self, chosen: NDArray[np.bool_] | None = None) -> Iterator[tuple[Column, Column]]:
        """All values (of the `chosen` ramps) with their weights, some at a time."""
        columns = self._columns()
        first, slope, count, weight = columns if chosen is None else (column[chosen] for column in columns)
        ends = np.cumsum(count)
        begin = 0
        while begin < len(first):
            passed = ends[begin - 1] if begin else 0.0
            end = max(begin + 1, int(np.searchsorted(ends, passed + _CHUNK, side="right")))
            counts = count[begin:end].astype(np.int64)
            index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            values = np.repeat(first[begin:end], counts) + np.repeat(slope[begin:end], counts) * index
            yield values, np.repeat(weight[begin:end], counts)
            begin = end


def _keys(values: Column) -> NDArray[np.int64]:
    """Integers in the order of the values: the bits of each float, those of negative ones turned around.

    Latencies spread over decades, and bins of equal leading bits spread with them.
    """
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.int64)
    return bits ^ ((bits >> 63) & np.int64(2**63 - 1))
