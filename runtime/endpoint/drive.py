"""Who sends which request when, and what came of each?

The same clients as of the simulator and of the runtime decide: open loop, closed loop, conversations. A request counts
from the moment at which it should have been sent, so that a client that is late makes nothing look faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from membound.roofline.scenario.workload import ClosedLoop, OpenArrivals
from membound.runtime.clock import WallClock
from membound.runtime.endpoint.stream import Reply, ReplyError
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.request import Request, Sequence

# Waits are never endless, for whoever watches a run may want to end it.
_LONGEST_WAIT_S = 3600.0
# The event loop is asked this often whether it is on time, and late by more than this it distorts gaps of tokens.
_PULSE_S = 0.02
LATE_S = 0.01

Ask = Callable[[Request], Awaitable[Reply]]


@dataclass(frozen=True)
class Answer:
    """A request with its reply, or with the reason why it has none. A turn may fail without having been sent."""

    request: Request
    ended_s: float
    reply: Reply | None = None
    reason: str = ""


@dataclass
class Pulse:
    """How late the client's own event loop was, in seconds: it is part of every time that it measures."""

    delays_s: list[float] = field(default_factory=list)

    async def beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _PULSE_S
            await asyncio.sleep(_PULSE_S)
            self.delays_s.append(max(0.0, loop.time() - due_s))


async def drive(
    requests: list[Request],
    arrivals: OpenArrivals | ClosedLoop,
    ask: Ask,
    clock: WallClock,
    answered: Callable[[Answer], None],
) -> list[Answer]:
    """Sends all requests at their times; every one of them, and every turn, is in the result once.

    `answered` is told each answer before the next request of the same user is chosen.
    """
    client = client_for(arrivals, requests)
    ended: asyncio.Queue[Answer] = asyncio.Queue()
    answers: list[Answer] = []

    async def one(request: Request) -> None:
        try:
            reply = await ask(request)
        except ReplyError as error:
            await ended.put(Answer(request, clock.now_s(), reason=str(error) or "no reason given"))
        else:
            await ended.put(Answer(request, reply.moments_s[-1], reply))

    async with asyncio.TaskGroup() as group:
        under_way = 0
        while True:
            for due in client.due(clock.now_s()):
                assert isinstance(due, Request), "a client of requests sends requests"
                group.create_task(one(due))
                under_way += 1
            next_s = client.next_arrival_s()
            if not under_way and next_s is None:
                return answers
            wait_s = _LONGEST_WAIT_S if next_s is None else next_s - clock.now_s()
            answer = await _next(ended, min(wait_s, _LONGEST_WAIT_S))
            while answer is not None:
                under_way -= 1
                answered(answer)
                answers += _with_unsent_turns(answer)
                client.ended(_ended(answer), answer.ended_s)
                answer = None if ended.empty() else ended.get_nowait()


async def _next(ended: asyncio.Queue[Answer], wait_s: float) -> Answer | None:
    """The next answer, or None after that many seconds."""
    if wait_s <= 0:
        await asyncio.sleep(0)
        return None if ended.empty() else ended.get_nowait()
    try:
        async with asyncio.timeout(wait_s):
            return await ended.get()
    except TimeoutError:
        return None


def _ended(answer: Answer) -> Sequence:
    sequence = Sequence.of(answer.request)
    sequence.status = "completed" if answer.reply is not None else "failed"
    return sequence


def _with_unsent_turns(answer: Answer) -> list[Answer]:
    """The answer; behind a failed one the turns that cannot follow it."""
    if answer.reply is not None or answer.request.follow_up is None:
        return [answer]
    unsent = answer.request.follow_up.turns()
    reason = "not sent, because a turn before it failed"
    return [answer, *(Answer(_at(turn, answer.ended_s), answer.ended_s, reason=reason) for turn in unsent)]


def _at(turn: Request, at_s: float) -> Request:
    return Request(turn.id, at_s, turn.prompt_tokens, turn.output_tokens)
