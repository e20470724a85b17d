"""What load does a workload make: how long are its requests, how many arrive a second, how long do clients think?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.scenario.workload import ClosedLoop, SessionPrompts, TraceArrivals, Workload
from membound.roofline.serving import mean_context
from membound.simulator.scheduling.workload import request_stream
from membound.simulator.scheduling.workload.arrivals import mean_rate_rps, mean_s
from membound.simulator.scheduling.workload.traces import Stamp, read_trace, stamp_of

# Requests that are drawn to estimate a workload's lengths.
SAMPLE = 2000
# Rows of a trace from which its rates are estimated: the first ones, however large the file is.
MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and outputs of a sample of requests."""

    prompts: NDArray[np.float64]
    outputs: NDArray[np.float64]

    @classmethod
    def of(cls, workload: Workload) -> Lengths:
        """The lengths of the workload's first requests, and of all turns of its first conversations."""
        firsts = islice(request_stream(workload), SAMPLE)
        turns = [turn for first in firsts for turn in first.turns()]
        prompts = np.array([turn.prompt_tokens for turn in turns], dtype=np.float64)
        return cls(prompts, np.array([turn.output_tokens for turn in turns], dtype=np.float64))

    @classmethod
    def fixed(cls, prompt_tokens: float, output_tokens: float) -> Lengths:
        return cls(np.array([prompt_tokens]), np.array([output_tokens]))

    def at_context(self, context: float) -> Lengths:
        """The same outputs, with equal prompts such that a decode step attends to `context` tokens on average."""
        outputs = np.minimum(self.outputs, max(context - 1.0, 1.0))
        prompt = max(1.0, context - (outputs.mean() + 1.0) / 2.0)
        return Lengths(np.full(len(outputs), prompt), outputs)

    def within(self, tokens: float) -> Lengths:
        """The lengths of requests of at most so many tokens, prompt and output; all if no request is that short."""
        short = self.prompts + self.outputs <= tokens
        return Lengths(self.prompts[short], self.outputs[short]) if short.any() and not short.all() else self

    @property
    def shortest(self) -> float:
        """Tokens of the shortest request, prompt and output."""
        return float((self.prompts + self.outputs).min())

    @property
    def longest(self) -> float:
        return float((self.prompts + self.outputs).max())

    @property
    def prompt_tokens(self) -> float:
        return float(self.prompts.mean())

    @property
    def output_tokens(self) -> float:
        return float(self.outputs.mean())

    @property
    def context(self) -> float:
        """Tokens that a decode step attends to for a sequence, on average over its output."""
        return mean_context(self.prompt_tokens, self.output_tokens)

    @property
    def end_together(self) -> float:
        """The chance that two requests that begin together end together: 1 where all outputs are as long."""
        counts = np.unique(self.outputs, return_counts=True)[1]
        return float(np.sum((counts / len(self.outputs)) ** 2))

    def longest_output_of(self, batch: float) -> float:
        """The mean of the longest of `batch` outputs: how many steps a static batch takes."""
        ordered = np.sort(self.outputs)
        below = np.arange(len(ordered) + 1.0) / len(ordered)
        return float(np.sum(ordered * np.diff(below ** max(batch, 1.0))))


def requests_beyond(workload: Workload, tokens: int) -> int:
    """How many of the workload's requests, of conversations all turns, have more tokens, prompt and output."""
    return sum(turn.tokens > tokens for first in request_stream(workload) for turn in first.turns())


@dataclass(frozen=True)
class Load:
    """`concurrency` clients, each with one request of these lengths under way.

    Of a closed loop with a number of requests the share `at_once` is there when the run begins. The share
    `amid_steps` comes while a step is under way, none where clients who do not think send the next request. Of an open
    workload `overload_rps` requests a second arrive beyond what all seats together serve; `busiest` says how many
    arrive when, where it is not the mean load.
    """

    concurrency: float
    lengths: Lengths
    overload_rps: float = 0.0
    busiest: str | None = None
    at_once: float = 0.0
    amid_steps: float = 0.0


def arrival_rate(workload: Workload) -> float | None:
    """Mean requests a second of an open workload, later turns of conversations among them; None of a closed loop."""
    arrivals = workload.arrivals
    if isinstance(arrivals, ClosedLoop):
        return None
    if isinstance(arrivals, TraceArrivals):
        times_s = recorded_times_s(arrivals)
        if len(times_s) < 2 or times_s[-1] <= times_s[0]:
            raise MemboundError("the trace of workload.arrivals is too short for a rate; give two rows or more")
        rate = (len(times_s) - 1) / float(times_s[-1] - times_s[0]) * arrivals.speed
    else:
        mean = mean_rate_rps(arrivals)
        assert mean is not None, "arrivals that are no trace have a mean rate"
        rate = mean
    return float(rate * turns_of(workload))


def think_s(workload: Workload) -> float:
    """Mean seconds that a client of a closed loop thinks before a request, or before a turn of its conversation."""
    arrivals, prompts = workload.arrivals, workload.prompts
    first_s = mean_s(arrivals.think) if isinstance(arrivals, ClosedLoop) and arrivals.think is not None else 0.0
    if not isinstance(prompts, SessionPrompts):
        return first_s
    turns = turns_of(workload)
    return (first_s + (turns - 1.0) * mean_s(prompts.think)) / turns


def turns_of(workload: Workload) -> float:
    """Mean requests of an arrival: the turns of a conversation."""
    if not isinstance(workload.prompts, SessionPrompts):
        return 1.0
    firsts = list(islice(request_stream(workload), SAMPLE))
    return sum(sum(1 for _ in first.turns()) for first in firsts) / len(firsts)


def recorded_times_s(trace: TraceArrivals) -> NDArray[np.float64]:
    """When the rows of the trace's window came, of the first MOST_ROWS, at the speed at which they were recorded."""
    return _recorded_times_s(trace.model_copy(update={"speed": 1.0}), stamp_of(trace))


@lru_cache(maxsize=4)
def _recorded_times_s(trace: TraceArrivals, stamp: Stamp) -> NDArray[np.float64]:
    return np.fromiter((row.time_s for row in islice(read_trace(trace), MOST_ROWS)), np.float64)
