"""How long does one call take, measured so that other programs hardly show?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import TypeVar

import torch

from membound.kernels.base import Kernels
from membound.kernels.bench.benchmark import Timer, cuda_timer

T = TypeVar("T")
Call = Callable[[T], object]

RowsTimer = Callable[[float], Timer]  # what times rows of calls within about so many seconds

SETTLE_CALLS = 48
RETRIES = 4
INTERRUPTED = 3.0  # times the median


class Stopwatch:
    """Times calls of one set of kernels on one device.

    On a CPU each call is timed by itself, on a tape where the kernels have them, because so does a decoder run them.
    The result is the mean, because a step is a sum of many calls, but without the samples that another program
    interrupted. On a GPU a row of calls is one CUDA graph, as a decode step is, and the timer is that of
    `membound kernels bench`; kernels that cannot be captured are timed with their launches, as they are served. Such a
    row is repeated at once, so that what it reads comes from memory only if it exceeds `row_cache_bytes`.
    """

    def __init__(self, kernels: Kernels, device: str, rows_timer: RowsTimer | None = None) -> None:
        """`rows_timer` is for tests."""
        self.device = torch.device(device)
        self._rows_timer = rows_timer or rows_timer_of(self.device)
        self.row_cache_bytes = cache_bytes_of(self.device)
        self._stalls = kernels.stalls
        self._record = getattr(kernels, "recording", None)
        x = torch.ones(1, 1024, device=device, dtype=kernels.activation_dtype)
        weight = kernels.pack(torch.ones(512, 1024, device=device), "bf16")
        self._shared_work = partial(kernels.linear, x, weight)

    def time_s(self, calls: Sequence[Call[T]], prepare: Callable[[], T], budget_s: float, fewest: int = 3) -> float:
        """Seconds of one of `calls`, which stand for each other and are taken in turn, within about `budget_s`.

        `prepare` makes a call's input. On a CPU it runs before each sample and is not timed: in a decoder no operator
        follows itself, so each finds its input, the caches and the interpreter as the operator before it left them.
        Samples in which the kernels missed a thread are taken again.
        """
        calls[-1](prepare())
        measure = self._measure(calls, prepare, budget_s, fewest)
        for _ in range(RETRIES):
            before = self._stalls()
            seconds = measure()
            if self._stalls() == before:
                break
            # After a stall the kernels keep to one thread for a while, which is not what is to be measured.
            for _ in range(SETTLE_CALLS):
                self._shared_work()
        return seconds

    def _measure(
        self, calls: Sequence[Call[T]], prepare: Callable[[], T], budget_s: float, fewest: int
    ) -> Callable[[], float]:
        if self._rows_timer is not None:
            timer = self._rows_timer(budget_s)
            return lambda: self._row_s(timer, calls, prepare(), budget_s)
        played = self._played(calls, prepare, budget_s, fewest)
        return played or (lambda: _calm_mean_s(calls, prepare, budget_s, fewest))

    def _played(
        self, calls: Sequence[Call[T]], prepare: Callable[[], T], budget_s: float, fewest: int
    ) -> Callable[[], float] | None:
        """What plays the calls, each behind what prepares it; None where they are not the kernels' alone."""
        if self._record is None:
            return None
        start_s = time.perf_counter()
        calls[0](prepare())
        count = int(budget_s / (time.perf_counter() - start_s))
        spans = []
        with self._record(computed=False) as tape:
            for i in range(max(fewest, min(count, len(calls)))):
                given = prepare()
                first = len(tape)
                calls[i % len(calls)](given)
                spans.append(slice(first, len(tape)))
        if tape.problem is not None or any(span.start == span.stop for span in spans):
            return None

        def mean_s() -> float:
            seconds = tape.timed_s()
            return _calm_mean([sum(seconds[span]) for span in spans])

        return mean_s

    def _row_s(self, timer: Timer, calls: Sequence[Call[T]], given: T, budget_s: float) -> float:
        try:
            return median(timer([partial(call, given) for call in calls]))
        except RuntimeError:  # what waits for the GPU cannot be captured
            return self._launched_row_s(calls, given, budget_s)

    def _launched_row_s(self, calls: Sequence[Call[T]], given: T, budget_s: float) -> float:
        rows: list[float] = []
        end_s = time.perf_counter() + budget_s
        while len(rows) < 3 or time.perf_counter() < end_s:
            torch.cuda.synchronize(self.device)
            start_s = time.perf_counter()
            for call in calls:
                call(given)
            torch.cuda.synchronize(self.device)
            rows.append((time.perf_counter() - start_s) / len(calls))
        return median(rows)


def cache_bytes_of(device: torch.device) -> int:
    """The GPU's L2; 0 on a CPU, where each call is timed behind others."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def rows_timer_of(device: torch.device) -> RowsTimer | None:
    """What times rows of calls on a GPU; None on a CPU, where each call is timed."""
    return partial(cuda_timer, device) if device.type == "cuda" else None


def _calm_mean_s(calls: Sequence[Call[T]], prepare: Callable[[], T], budget_s: float, fewest: int) -> float:
    samples: list[float] = []
    end_s = time.perf_counter() + budget_s
    for i in range(max(fewest, len(calls))):
        given = prepare()
        start_s = time.perf_counter()
        calls[i % len(calls)](given)
        now_s = time.perf_counter()
        samples.append(now_s - start_s)
        if now_s > end_s and len(samples) >= fewest:
            break
    return _calm_mean(samples)


def _calm_mean(samples: Sequence[float]) -> float:
    limit_s = INTERRUPTED * median(samples)
    return fmean(seconds for seconds in samples if seconds <= limit_s)
