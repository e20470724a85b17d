"""When does which request arrive?"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Protocol

from membound.roofline.scenario.workload import ClosedLoop, OpenArrivals
from membound.simulator.scheduling.request import Request, Sequence


class Client(Protocol):
    """Sends requests to the engine; the loop asks it at every step, with the time of its own clock."""

    def due(self, now_s: float) -> Items[Request | Sequence]:
        """What has arrived by `now_s` and was not handed out before, in order of arrival.

        Requests, or sequences whose prompts were computed elsewhere.
        """

    def next_arrival_s(self) -> float | None:
        """When the next request arrives if nothing ends before; None if none will, infinity if nobody knows."""

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """A request was answered (or refused, as its status says) at `now_s`."""


class OpenLoop:
    """Requests arrive at their own times, whatever the engine does; follow-ups some time after their answer.

    `requests` may be a stream: it is read one request ahead, in order of arrival.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._coming = iter(requests)
        self._first = next(self._coming, None)
        self._follow_ups = _Departures()
        self._next_s = self._soonest_s()

    def due(self, now_s: float) -> list[Request]:
        arrived: list[Request] = []
        while (at_s := self._next_s) is not None and at_s <= now_s:
            if self._first is not None and self._first.arrival_s == at_s:
                arrived.append(self._first)
                self._first = next(self._coming, None)
                assert self._first is None or self._first.arrival_s >= at_s, "requests must be in order of arrival"
            else:
                arrived.append(self._follow_ups.pop())
            self._next_s = self._soonest_s()
        return arrived

    def next_arrival_s(self) -> float | None:
        return self._next_s

    def ended(self, sequence: Sequence, now_s: float) -> None:
        if (turn := _next_turn(sequence)) is not None:
            self._follow_ups.add(turn, now_s)
            self._next_s = self._soonest_s()

    def _soonest_s(self) -> float | None:
        first, follow_up_s = self._first, self._follow_ups.next_s
        if first is None or follow_up_s is None:
            return follow_up_s if first is None else first.arrival_s
        return min(first.arrival_s, follow_up_s)


class ClosedLoopClients:
    """`users` users; each sends its next request, thinking first, when its last one (or conversation) has ended."""

    def __init__(self, requests: Iterable[Request], users: int) -> None:
        self._unsent = iter(requests)
        self._departures = _Departures()
        for _ in range(users):
            if not self._send_next(0.0):
                break

    def due(self, now_s: float) -> list[Request]:
        arrived = []
        while (at_s := self._departures.next_s) is not None and at_s <= now_s:
            arrived.append(self._departures.pop())
        return arrived

    def next_arrival_s(self) -> float | None:
        return self._departures.next_s

    def ended(self, sequence: Sequence, now_s: float) -> None:
        if (turn := _next_turn(sequence)) is not None:
            self._departures.add(turn, now_s)
        else:
            self._send_next(now_s)

    def _send_next(self, now_s: float) -> bool:
        request = next(self._unsent, None)
        if request is not None:
            self._departures.add(request, now_s)
        return request is not None


class _Departures:
    """Requests that will be sent at a known time, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request, now_s: float) -> None:
        """`request` is sent after its user has thought, from `now_s` on."""
        at_s = now_s + request.think_s
        heapq.heappush(self._heap, (at_s, request.id, replace(request, arrival_s=at_s)))

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]


def _next_turn(sequence: Sequence) -> Request | None:
    """The turn that follows an answered one; a turn that is refused or fails ends its conversation."""
    turn = sequence.request.follow_up
    if turn is None or sequence.status in ("rejected", "failed"):
        return None
    if turn.prompt_ids is not None:
        # The history is what the model really wrote, not what stood in for it while nobody knew.
        assert sequence.token_ids is not None, "a turn with tokens follows one with tokens"
        said = tuple(sequence.token_ids)
        turn = replace(turn, prompt_ids=said + turn.prompt_ids[len(said) :])
    return turn


def client_for(arrivals: OpenArrivals | ClosedLoop, requests: Iterable[Request]) -> Client:
    """The client that sends `requests` (whose arrival times are set for open-loop arrivals)."""
    if isinstance(arrivals, ClosedLoop):
        return ClosedLoopClients(requests, arrivals.concurrency)
    return OpenLoop(requests)
