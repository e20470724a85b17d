"""How long does a linear take at each shape, with its weights from memory and from a cache?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from membound.kernels.base import Kernels, WeightFormat
from membound.kernels.bench.benchmark import BEYOND_L2
from membound.roofline.hardware.calibration import CACHE_SET_BYTES, LinearTable
from membound.runtime.calibration.pool import PackedLayout, Pool
from membound.runtime.calibration.stopwatch import Stopwatch

Cell = tuple[int, int, int]

SAMPLES = 32
MOST_SAMPLES = 256  # of weights so small that their launch is what takes time


@dataclass(frozen=True)
class LinearGrid:
    """The shapes to measure, the seconds to spend on a cell, and those beyond which a call is not measured.

    The C++ kernels have their steps behind 8, 16 and 32 tokens, so both sides of each are measured.
    """

    formats: tuple[WeightFormat, ...] = ("bf16", "int8", "fp32", "int4", "w8a8", "w4a8", "fp8", "sparse24")
    n: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    k: tuple[int, ...] = (256, 1024, 4096)
    m: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 128, 256, 512)
    cell_s: float = 2e-3
    longest_s: float = 25e-3

    @property
    def size(self) -> int:
        """Cells of one format in one regime."""
        return len(self.n) * len(self.k) * len(self.m)


class LinearProbe:
    """Measures the linears of a grid; a pass takes each cell once."""

    def __init__(self, kernels: Kernels, stopwatch: Stopwatch, pool: Pool, grid: LinearGrid) -> None:
        self.kernels = kernels
        self.stopwatch = stopwatch
        self.pool = pool
        self.grid = grid

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Those of the grid that these kernels have at a speed of their own."""
        return tuple(format for format in self.grid.formats if self._has(format))

    def _has(self, format: WeightFormat) -> bool:
        if not all(PackedLayout.fits(self.kernels, format, k) for k in self.grid.k):
            return False
        packed = (PackedLayout.of(self.kernels, format, self.grid.n[0], k).like for k in self.grid.k)
        return not any(self.kernels.emulates(weight) for weight in packed)

    def one_s(self, format: WeightFormat, n: int, k: int, m: int, cached: bool) -> float:
        """Seconds of one linear call at a shape."""
        within = CACHE_SET_BYTES if cached else None
        count = SAMPLES if cached else self._beyond_cache(PackedLayout.of(self.kernels, format, n, k).nbytes)
        weights = self.pool.weights(self.kernels, format, n, k, count, within)
        calls = [partial(self.kernels.linear, weight=weight) for weight in weights]
        if cached:
            self.pool.bytes[:CACHE_SET_BYTES].view(torch.float32).sum()
        gate_up = torch.ones(m, 2 * k, dtype=self.kernels.activation_dtype, device=self.pool.bytes.device)
        return self.stopwatch.time_s(calls, lambda: self.kernels.silu_mul(gate_up), self.grid.cell_s, fewest=2)

    def _beyond_cache(self, nbytes: int) -> int:
        """How many weights of so many bytes a row of calls reads, so that none is still cached when it is repeated."""
        return max(SAMPLES, min(MOST_SAMPLES, -(-BEYOND_L2 * self.stopwatch.row_cache_bytes // nbytes)))

    def measure(self, format: WeightFormat, cached: bool) -> Iterator[float]:
        """Seconds of each cell of the grid in order of n, k and m; NaN where a cell is not measured.

        A cell is left out where its weight exceeds the memory that it must come from, or where it would take too long.
        """
        g = self.grid
        seconds = np.full((len(g.n), len(g.k), len(g.m)), np.nan)
        room = CACHE_SET_BYTES if cached else self.pool.size_bytes
        for (a, n), (b, k), (c, m) in itertools.product(enumerate(g.n), enumerate(g.k), enumerate(g.m)):
            nbytes = PackedLayout.of(self.kernels, format, n, k).nbytes
            if nbytes <= room and not _too_long(seconds, (a, b, c), g):
                seconds[a, b, c] = self.one_s(format, n, k, m, cached)
            yield float(seconds[a, b, c])

    def table(self, memory: NDArray[np.float64], cache: NDArray[np.float64]) -> LinearTable:
        """The table of two measurements, their gaps filled at the efficiency of the nearest smaller shape."""
        g = self.grid
        memory_s = _filled(memory, g)
        cache_s = np.minimum(_filled(cache, g), memory_s)
        return LinearTable(n=list(g.n), k=list(g.k), m=list(g.m), memory_s=memory_s.tolist(), cache_s=cache_s.tolist())


def _flops(grid: LinearGrid) -> NDArray[np.float64]:
    n, k, m = np.meshgrid(grid.n, grid.k, grid.m, indexing="ij")
    return 2.0 * n * k * m


def _smaller(cell: Cell) -> list[Cell]:
    """The cell's neighbours with the next smaller n, k and m."""
    a, b, c = cell
    return [near for near in ((a - 1, b, c), (a, b - 1, c), (a, b, c - 1)) if min(near) >= 0]


def _too_long(seconds: NDArray[np.float64], cell: Cell, grid: LinearGrid) -> bool:
    """Whether a cell would exceed `longest_s` at the efficiency of a smaller neighbour, or a smaller m already did."""
    a, b, c = cell
    if c > 0 and np.isnan(seconds[a, b, c - 1]):
        return True
    flops = _flops(grid)
    guesses = [seconds[near] / flops[near] * flops[cell] for near in _smaller(cell)]
    known = [guess for guess in guesses if np.isfinite(guess)]
    return bool(known) and known[0] > grid.longest_s


def _filled(seconds: NDArray[np.float64], grid: LinearGrid) -> NDArray[np.float64]:
    """Gaps take the seconds per FLOP of the next smaller n, else k, else m."""
    per_flop = seconds.reshape(len(grid.n), len(grid.k), len(grid.m)) / _flops(grid)
    for cell in zip(*np.nonzero(np.isnan(per_flop)), strict=True):
        known = [per_flop[near] for near in _smaller(cell) if np.isfinite(per_flop[near])]
        per_flop[cell] = known[0]
    filled: NDArray[np.float64] = per_flop * _flops(grid)
    return filled
