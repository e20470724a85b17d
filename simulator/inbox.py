"""How does an engine learn of work that arrives at times not known in advance?"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

import simpy

from membound.simulator.scheduling.loop import Waits
from membound.simulator.scheduling.request import Request, Sequence

Ended = Callable[[Sequence, float], None]


class VirtualClock:
    """SimPy's time."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env

    def now_s(self) -> float:
        return float(self.env.now)


class Inbox:
    """What other processes send to an engine, each piece from a known time on; wakes the engine that sleeps.

    The engine looks up after each step, or run of equal steps, and when it is woken; `looks` is told first.
    """

    def __init__(self, env: simpy.Environment, ended: Ended, looks: Callable[[float], None]) -> None:
        self.env = env
        self.ended = ended
        self.looks = looks
        self._pieces: list[tuple[float, int, Request | Sequence]] = []
        self._news: simpy.Event | None = None
        self._changes_s = math.inf  # the earliest change that the engine was not woken for

    def __len__(self) -> int:
        return len(self._pieces)

    def put(self, piece: Request | Sequence, at_s: float) -> None:
        """`piece` is there from `at_s` on."""
        heapq.heappush(self._pieces, (at_s, piece.id, piece))
        self.wake(at_s)

    def wake(self, at_s: float) -> None:
        """Something changes at `at_s` that the engine should look at."""
        self._changes_s = min(self._changes_s, at_s)
        if self._news is not None and not self._news.triggered:
            self._news.succeed()

    def due(self, now_s: float) -> list[Request | Sequence]:
        self.looks(now_s)
        arrived = []
        while self._pieces and self._pieces[0][0] <= now_s:
            arrived.append(heapq.heappop(self._pieces)[2])
        return arrived

    def next_arrival_s(self) -> float | None:
        return self._pieces[0][0] if self._pieces else math.inf

    def process(self, waits: Waits) -> Iterator[simpy.Event]:
        """The engine as a process: it sleeps through each step, or run of equal steps, until something is sent."""
        until_s = next(waits)
        while True:
            self._news, self._changes_s = self.env.event(), math.inf
            awake = self._news
            if until_s == math.inf:
                yield awake
            else:
                yield self.env.timeout(max(0.0, until_s - self.env.now)) | awake
            sent_s = self._changes_s if awake.triggered and self.env.now < until_s else None
            until_s = waits.send(sent_s)
