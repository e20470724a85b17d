"""How does an engine serve? One loop for the simulator and the runtime; only the clock and the executor differ."""

from __future__ import annotations

from collections.abc import Iterator
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
        """What the step came to; `sequences` holds all sequences of the engine by id."""


def serve(
    scheduler: Scheduler, client: Client, executor: Executor, clock: Clock, recorder: Recorder
) -> Iterator[float]:
    """Serves every request of `client`; yields the time in seconds until which the caller's clock must advance.

    A real clock has already passed that time when the executor was real, so the runtime waits only for arrivals.
    """
    sequences: dict[int, Sequence] = {}
    while True:
        for request in client.due(clock.now_s()):
            sequence = scheduler.add(request)
            if sequence.status == "rejected":
                recorder.rejected(sequence)
                client.ended(sequence, clock.now_s())
            else:
                sequences[sequence.id] = sequence

        start_s = clock.now_s()
        step = scheduler.plan()
        if step is None:
            arrival_s = client.next_arrival_s()
            if arrival_s is None:
                return
            recorder.idle(max(0.0, arrival_s - start_s))
            yield arrival_s
            continue

        outcome = executor.run(step, sequences)
        yield start_s + outcome.time_s

        end_s = clock.now_s()
        ended = scheduler.commit(step, outcome)
        recorder.step(step, outcome, sequences, start_s, end_s)
        for sequence in ended:
            recorder.completed(sequence)
            client.ended(sequence, end_s)
            del sequences[sequence.id]
