"""When does which request arrive?"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from membound.roofline.scenario import (
    ClosedLoop,
    FixedLength,
    Length,
    LognormalLength,
    PoissonArrivals,
    UniformLength,
)
from membound.simulator.scheduling.request import Request


class Client(Protocol):
    """Sends requests to the engine; the loop asks it at every step, with the time of its own clock."""

    def due(self, now_s: float) -> list[Request]:
        """The requests that have arrived by `now_s` and were not handed out before, in order of arrival."""

    def next_arrival_s(self) -> float | None:
        """When the next request arrives if nothing ends before; None if none will."""

    def ended(self, now_s: float) -> None:
        """One request was answered (or refused) at `now_s`."""


class OpenLoop:
    """Requests arrive at their own times, whatever the engine does."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._coming = sorted(requests, key=lambda request: (request.arrival_s, request.id), reverse=True)

    def due(self, now_s: float) -> list[Request]:
        arrived = []
        while self._coming and self._coming[-1].arrival_s <= now_s:
            arrived.append(self._coming.pop())
        return arrived

    def next_arrival_s(self) -> float | None:
        return self._coming[-1].arrival_s if self._coming else None

    def ended(self, now_s: float) -> None:
        pass


class ClosedLoopClients:
    """`concurrency` users; each sends its next request at the moment its last one was answered."""

    def __init__(self, requests: Iterable[Request], concurrency: int) -> None:
        self._unsent = list(requests)[::-1]
        self._send_at: list[float] = [0.0] * min(concurrency, len(self._unsent))

    def due(self, now_s: float) -> list[Request]:
        arrived = []
        while self._unsent and self._send_at and self._send_at[0] <= now_s:
            arrival_s = heapq.heappop(self._send_at)
            request = self._unsent.pop()
            arrived.append(_arriving(request, arrival_s))
        return arrived

    def next_arrival_s(self) -> float | None:
        return self._send_at[0] if self._unsent and self._send_at else None

    def ended(self, now_s: float) -> None:
        heapq.heappush(self._send_at, now_s)


def _arriving(request: Request, arrival_s: float) -> Request:
    return Request(
        request.id, arrival_s, request.prompt_tokens, request.output_tokens, request.prompt_ids, request.output_ids
    )


def client_for(arrivals: PoissonArrivals | ClosedLoop, requests: list[Request]) -> Client:
    """The client that sends `requests` (whose arrival times are set for open-loop arrivals)."""
    if isinstance(arrivals, ClosedLoop):
        return ClosedLoopClients(requests, arrivals.concurrency)
    return OpenLoop(requests)


def sample_lengths(length: Length, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` token counts drawn from a length distribution."""
    match length:
        case FixedLength():
            return np.full(count, length.tokens)
        case UniformLength():
            return rng.integers(length.low, length.high + 1, count)
        case LognormalLength():
            drawn = np.exp(rng.normal(np.log(length.median), length.sigma, count))
            return np.clip(np.rint(drawn), length.low, length.high).astype(np.int64)


def sample_arrivals_s(
    arrivals: PoissonArrivals | ClosedLoop, count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Arrival times in seconds; zeros for a closed loop, whose clients decide as they go."""
    if isinstance(arrivals, ClosedLoop):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1 / arrivals.rate_rps, count))
