"""How fast is a working set read again and again, in each cache and in memory?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from membound.kernels.base import Kernels, PackedWeight
from membound.runtime.calibration.pool import Pool
from membound.runtime.calibration.stopwatch import Call, Stopwatch

MIB = 2**20
WORKING_SETS = tuple(int(mib * MIB) for mib in (0.25, 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024))
COLUMNS = 4096
SAMPLES = 24
CELL_S = 20e-3
# Below this a read takes no longer than its call, so the same bytes are read many times in one call.
REPEATED_BELOW = 8 * MIB
REPEATED_BYTES = 32 * MIB


class BandwidthProbe:
    """Reads working sets of a pool with whatever reads fastest here: the roof must not lie below what a kernel does."""

    def __init__(self, kernels: Kernels, stopwatch: Stopwatch, pool: Pool) -> None:
        self.kernels = kernels
        self.stopwatch = stopwatch
        self.pool = pool

    def measure(self, working_sets: Sequence[int]) -> Iterator[float]:
        """Seconds a byte of each working set."""
        for size in working_sets:
            readers = self._readers(size)
            yield min(self.stopwatch.time_s([call] * SAMPLES, lambda: None, CELL_S) / count for count, call in readers)

    def _readers(self, size: int) -> Iterator[tuple[int, Call[None]]]:
        """Ways to read a working set, with the bytes that each reads in a call."""
        words = self.pool.parts(size, 1, within_bytes=size)[0].view(torch.float32)
        if size < REPEATED_BELOW:
            times = REPEATED_BYTES // size
            again = words.expand(times, -1)
            yield times * size, lambda _: again.sum()
        columns = min(COLUMNS, words.numel() // 64)
        matrix, vector = words.view(-1, columns), torch.ones(columns, device=words.device)
        yield size, lambda _: torch.mv(matrix, vector)
        x = torch.ones(1, columns, dtype=self.kernels.activation_dtype, device=words.device)
        weight = PackedWeight("fp32", matrix)
        yield size, lambda _: self.kernels.linear(x, weight)
