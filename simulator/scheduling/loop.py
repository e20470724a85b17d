"""How does an engine serve? One loop for the simulator and the runtime; only the clock and the executor differ."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from membound.simulator.scheduling.client import Client
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Outcome, Sequence, Step
from membound.simulator.scheduling.scheduler import Scheduler


class Clock(Protocol):
    """Tells the time in seconds since the run began; virtual in the simulator, real in the runtime."""

    def now_s(self) -> float: ...


class Executor(Protocol):
    """Computes a step: the runtime with tensors, the simulator with the roofline."""

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        """What the step, or up to `step.steady` of them, came to; `sequences` holds those of the engine by id."""


# The caller may send the time of something that arrived before the time that was yielded.
Waits = Generator[float, float | None, None]


def serve(scheduler: Scheduler, client: Client, executor: Executor, clock: Clock, recorder: Recorder) -> Waits:
    """Serves every request of `client`; yields the time in seconds until which the caller's clock must advance.

    A real clock has already passed that time when the executor was real, so the runtime waits only for arrivals. Where
    arrivals are not known before (the client's next one is at infinity), the caller sends the time of what arrived
    meanwhile: equal steps that were to run as one then end with the step that is under way.
    """
    sequences: dict[int, Sequence] = {}
    while True:
        start_s = clock.now_s()
        for arrived in client.due(start_s):
            sequence = arrived if isinstance(arrived, Sequence) else Sequence.of(arrived)
            scheduler.queue(sequence)
            if sequence.status == "rejected":
                recorder.rejected(sequence)
                client.ended(sequence, start_s)
            else:
                sequences[sequence.id] = sequence

        step = scheduler.plan()
        arrival_s = client.next_arrival_s()
        if step is None:
            if arrival_s is None:
                return
            yield arrival_s
            recorder.idle(clock.now_s() - start_s)
            continue

        outcome = executor.run(step, sequences)
        if outcome.steps > 1 and arrival_s is not None:
            outcome = outcome.until(arrival_s - start_s)
        while (news_s := (yield start_s + outcome.time_s)) is not None:
            outcome = outcome.until(news_s - start_s)

        end_s = clock.now_s()
        usage = scheduler.usage(step, outcome)
        ended = scheduler.commit(step, outcome)
        if scheduler.lengths is not None:
            scheduler.lengths.observe(step, outcome, end_s - start_s)
        recorder.step(step, outcome, usage, sequences, start_s, end_s)
        for sequence in ended:
            recorder.completed(sequence)
            client.ended(sequence, end_s)
            del sequences[sequence.id]
            if scheduler.lengths is not None:
                scheduler.lengths.forget(sequence.id)
