"""Does memory give now what it gave when the machine was calibrated?

A virtual machine moves: while its processors share a link to memory they read half as fast as when each has its own,
and the next minute may differ. What was measured in one such state says nothing about another.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from membound.kernels.arena import Arena
from membound.roofline.hardware.calibration import one_state
from membound.runtime.free_memory import free_bytes

BUFFER_BYTES = 256 * 2**20  # read in turn, so that a part was last read beyond most caches ago
PARTS = 4
READS = 3
PAUSE_S = 0.2


class MemoryWatch:
    """Reads a large buffer with all of torch's threads, which takes some milliseconds and needs no kernels."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        # Memory that was never written is one page of zeros, which a cache holds.
        buffer = Arena().empty((buffer_bytes,), torch.uint8).fill_(1)
        self._parts = list(buffer.view(torch.float32).chunk(PARTS))
        self._next = 0

    def rate(self) -> float:
        """Bytes/s that memory gives now."""
        return median(self._read() for _ in range(READS))

    def settled(self, expected: float, patience_s: float) -> float:
        """Waits up to `patience_s` until memory gives the `expected` bytes/s; returns the seconds that it waited."""
        start_s = time.perf_counter()
        while not one_state(self.rate(), expected) and time.perf_counter() - start_s < patience_s:
            time.sleep(PAUSE_S)
        return time.perf_counter() - start_s

    def _read(self) -> float:
        part = self._parts[self._next]
        self._next = (self._next + 1) % PARTS
        start_s = time.perf_counter()
        part.sum()
        return part.nbytes / (time.perf_counter() - start_s)


def watchable(device: str) -> bool:
    """Whether memory is this process's to read, and has room for the buffer several times over."""
    return device.startswith("cpu") and free_bytes() > 8 * BUFFER_BYTES
