"""What does one replica of a cluster have to do, and what happens to its requests when it fails?"""

from __future__ import annotations

import heapq
import math
from typing import Literal, NamedTuple, Protocol

import simpy

from membound.simulator.run import DeployedScenario
from membound.simulator.scheduling.build import bounds_of, build_scheduler
from membound.simulator.scheduling.loop import Waits, serve
from membound.simulator.scheduling.prefix import Span
from membound.simulator.scheduling.recorder import NAN, Observer, Recorder
from membound.simulator.scheduling.request import Outcome, Request, Sequence, Step
from membound.simulator.scheduling.scheduler import Scheduler

State = Literal["starting", "up", "draining", "down", "released"]


class Owner(Protocol):
    """The cluster, as a replica sees it."""

    def dispatch(self, now_s: float) -> None:
        """Sends every request that has arrived by now to a replica."""

    def ended(self, replica: Replica, sequence: Sequence, now_s: float) -> None:
        """A request was answered, or refused."""


class ReplicaRecorder(Recorder):
    """Keeps also what was lost."""

    def lost(self, sequence: Sequence) -> None:
        """`sequence` is no longer here; its last token came when it came."""
        self._left(sequence)

    def failed(self, sequence: Sequence) -> None:
        """`sequence` is answered nowhere."""
        self._request(sequence, NAN, 0.0)


class Begun(NamedTuple):
    """The step, or run of equal steps, that is under way."""

    start_s: float
    outcome: Outcome


class Replica:
    """An engine that learns of a request when the router sends it, and can lose its memory.

    `state` says whether it takes requests (up). Equal steps run as one event here too; `catch_up` ends those of them
    that are over, where somebody wants to look at the memory or where it fails.
    """

    scheduler: Scheduler
    _begun: Begun | None  # the step that is under way
    _clock_s: float | None  # what its engine takes for now while it catches up
    _waits: Waits
    _until_s: float  # when the step that is under way ends; infinity where there is none

    def __init__(
        self,
        env: simpy.Environment,
        owner: Owner,
        number: int,
        group: int,
        deployment: DeployedScenario,
        observer: Observer | None,
        step_by_step: bool,
    ) -> None:
        self.env = env
        self.owner = owner
        self.number = number
        self.group = group
        self.deployment = deployment
        self.state: State = "starting"
        self.step_tokens = deployment.scenario.step_tokens
        self.failures = 0
        self.recorder = ReplicaRecorder(
            observer, bounds_of(deployment.model, deployment.scenario.setup, deployment.times)
        )
        self.unanswered = 0
        self.unanswered_tokens = 0
        self.paid_from_s = float(env.now)
        self.released_s: float | None = None
        self._busy, self._up = Stopwatch(), Stopwatch()
        self._executor = deployment.executor(step_by_step)
        self._pieces: list[tuple[float, int, Request | Sequence]] = []
        self._boot()

    # -- what the cluster asks and does

    def put(self, piece: Request | Sequence, now_s: float) -> None:
        """The router sends a request, or a sequence that was begun elsewhere."""
        request = piece.request if isinstance(piece, Sequence) else piece
        self.unanswered += 1
        self.unanswered_tokens += request.tokens
        self._busy.start(now_s)
        heapq.heappush(self._pieces, (now_s, piece.id, piece))
        if self._until_s == math.inf:
            self._sleep_until(now_s)
        elif self._begun is not None and self._begun.outcome.steps > 1:
            self._sleep_until(self._waits.send(now_s))  # with the step that is under way the equal ones end

    def refuses(self, request: Request) -> bool:
        """Whether it could never serve `request`."""
        return self.scheduler.refusal(request) is not None

    def cached_blocks(self, prefix: list[Span]) -> int:
        """How many of a prompt's blocks, from the first on, would be found here in a prefix cache, a rank's at best."""
        scheduler, begun = self.scheduler, self._begun
        if scheduler.pool.cache is None or not prefix:
            return 0
        if begun is not None and any(
            scheduler.decoders.growth_over(1, begun.outcome.steps, rank) > pool.free
            for rank, pool in enumerate(scheduler.pools)
        ):
            self.catch_up()  # steps that are over may have taken memory from the cache
        found = [pool.cache.found(prefix) for pool in scheduler.pools if pool.cache is not None]
        return max(here + there for here, _, there in found)

    def serves(self, now_s: float) -> None:
        """It takes requests from now on."""
        self.state = "up"
        self._up.start(now_s)

    def drain(self) -> None:
        """It answers what it has, and takes no more."""
        self.state = "draining"

    def release(self, now_s: float) -> None:
        """It is given back, and no longer paid for."""
        self._up.stop(now_s)
        self.state, self.released_s = "released", now_s

    def fail(self, now_s: float) -> list[Sequence]:
        """It loses its memory; returns the sequences that were here, in the order in which they came."""
        self.catch_up()
        self.scheduler.check_integrity()
        self._waits.close()
        lost = [*self.scheduler.running, *self.scheduler.waiting]
        lost.sort(key=lambda sequence: sequence.number)
        for sequence in lost:
            self.recorder.lost(sequence)
        while self._pieces:
            piece = heapq.heappop(self._pieces)[2]
            lost.append(piece if isinstance(piece, Sequence) else Sequence.of(piece))
        assert len(lost) == self.unanswered, "a request was lost before its replica was"
        self.unanswered = self.unanswered_tokens = 0
        self._busy.stop(now_s)
        self._up.stop(now_s)
        self.failures += 1
        self.state = "down"
        self._boot()
        return lost

    def busy_s(self, now_s: float) -> float:
        """Seconds with a request to answer, until now."""
        return self._busy.total_s(now_s)

    def up_s(self, now_s: float) -> float:
        """Seconds in which it took requests or answered them, until now."""
        return self._up.total_s(now_s)

    def catch_up(self) -> None:
        """Ends the steps that are over of a run of equal ones, so that memory is as if they had run one by one."""
        begun = self._begun
        if begun is None or begun.outcome.steps == 1:
            return
        start_s, outcome = begun
        over = outcome.until(self.env.now - start_s).steps
        if over == outcome.steps or start_s + outcome.time_of(over) > self.env.now:
            over -= 1
        if not over:
            return
        # A moment within the last step that is over: the engine looks up when that one ends.
        self._clock_s = self._waits.send(start_s + (outcome.time_of(over - 1) + outcome.time_of(over)) / 2)
        until_s = self._waits.send(None)
        self._clock_s = None
        self._sleep_until(until_s)

    # -- what its engine asks: its client, its clock and its executor are the replica

    def due(self, now_s: float) -> list[Request | Sequence]:
        self._begun = None
        if self._clock_s is None:
            self.owner.dispatch(now_s)
        arrived = []
        while self._pieces and self._pieces[0][0] <= now_s:
            arrived.append(heapq.heappop(self._pieces)[2])
        return arrived

    def next_arrival_s(self) -> float | None:
        return self._pieces[0][0] if self._pieces else math.inf

    def ended(self, sequence: Sequence, now_s: float) -> None:
        self.unanswered -= 1
        self.unanswered_tokens -= sequence.request.tokens
        if not self.unanswered:
            self._busy.stop(now_s)
        self.owner.ended(self, sequence, now_s)

    def now_s(self) -> float:
        return float(self.env.now) if self._clock_s is None else self._clock_s

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        outcome = self._executor.run(step, sequences)
        self._begun = Begun(self.now_s(), outcome)
        return outcome

    # -- how it sleeps

    def _boot(self) -> None:
        """An engine with nothing in its memory."""
        d = self.deployment
        self.scheduler = build_scheduler(d.scenario, d.model, d.times, d.memory, d.content_known)
        self._begun = None
        self._clock_s = None
        self._waits = serve(self.scheduler, self, self, self, self.recorder)
        self._until_s = math.inf
        self._sleep_until(float(self.env.now))

    def _sleep_until(self, until_s: float) -> None:
        """Its engine sleeps until a time, or until something is sent."""
        if until_s != self._until_s:
            self._until_s = until_s
            if until_s < math.inf:
                timeout = self.env.timeout(max(0.0, until_s - self.env.now), until_s)
                timeout.callbacks.append(self._awake)

    def _awake(self, timeout: simpy.Event) -> None:
        """Goes on, unless it has meanwhile been told to sleep until another time."""
        if timeout.value == self._until_s:
            self._sleep_until(self._waits.send(None))


class Stopwatch:
    """Sums up how long something was so."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s: float | None = None

    def start(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s

    def stop(self, now_s: float) -> None:
        self._total_s = self.total_s(now_s)
        self._since_s = None

    def total_s(self, now_s: float) -> float:
        """Until now."""
        return self._total_s + (0.0 if self._since_s is None else now_s - self._since_s)
