"""Does a deployment meet the objective in the simulator, and if not, by how much does it miss?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from membound.roofline.models.files import resolve_model
from membound.roofline.results.result import Summary
from membound.roofline.scenario import Scenario, Slo
from membound.roofline.scenario.workload import SessionPrompts
from membound.simulator.load import requests_beyond
from membound.simulator.planning.deployed import Deployed, name_of
from membound.simulator.scheduling.request import Sequence

# Who is so many times too slow is not tried again at a load that differs by a tenth.
FAR = 1.5


class Lateness:
    """Watches a run for first tokens that come FAR too late, until their 99th percentile surely does.

    It is `hopeless` then, whatever the rest of the run is like, and of a deployment that misses by far nothing else is
    asked than that it does. Requests of conversations are not counted before, so that they are served to the end.
    """

    def __init__(self, deployed: Deployed, scenario: Scenario) -> None:
        workload, bound_s = scenario.workload, deployed.demand.slo.ttft_s
        counted = workload.requests is not None and not isinstance(workload.prompts, SessionPrompts)
        self.allowed = 0.01 * (workload.requests or 0) + 1.0 if counted else math.inf
        self.bound_s = math.inf if bound_s is None else FAR * bound_s
        self.late = 0

    def __call__(self, sequence: Sequence) -> bool:
        first_s = sequence.first_token_s
        self.late += first_s is not None and first_s - sequence.request.arrival_s > self.bound_s
        return self.hopeless

    @property
    def hopeless(self) -> bool:
        return self.late > self.allowed


def without_too_long(summary: Summary, scenario: Scenario) -> Summary:
    """The summary without the requests that every engine refuses, as they are longer than the model's context."""
    if not summary.rejected:
        return summary
    too_long = requests_beyond(scenario.workload, resolve_model(scenario.model).max_context)
    too_long = min(too_long, summary.rejected)  # a run that was given up has not seen all
    kept = {"requests": summary.requests - too_long, "rejected": summary.rejected - too_long}
    return summary.model_copy(update=kept)


def simulate_while_hopeful(deployed: Deployed) -> tuple[Summary, bool]:
    """One of the replicas with its share of the load, or both pools with all of it, served by the simulator; and
    whether to the end: pools of whose first tokens too many come far too late are not.

    A summary of less says, as that of all would, that it misses the objective FAR, and by first tokens.
    """
    from membound.simulator.run import run

    scenario = deployed.scenario
    lateness = Lateness(deployed, scenario)
    summary = without_too_long(run(scenario, enough=lateness).summary, scenario)
    return summary, not lateness.hopeless


class _Bounded(NamedTuple):
    """A 99th percentile that the objective bounds."""

    metric: str
    p99_s: float
    bound_s: float

    @property
    def times_too_slow(self) -> float:
        return self.p99_s / self.bound_s


def _bounded(summary: Summary, slo: Slo) -> list[_Bounded]:
    asked = (
        ("TTFT", summary.ttft_s, slo.ttft_s),
        ("TPOT", summary.tpot_s, slo.tpot_s),
        ("end to end", summary.e2e_s, slo.e2e_s),
    )
    return [
        _Bounded(metric, value.p99, bound)
        for metric, value, bound in asked
        if bound is not None and value.p99 is not None
    ]


def _serves_everybody(summary: Summary) -> bool:
    return not summary.rejected and summary.completed > 0


def meets(summary: Summary, slo: Slo) -> bool:
    """Whether everybody was served, and the 99th percentiles are within the bounds."""
    return _serves_everybody(summary) and all(one.p99_s <= one.bound_s for one in _bounded(summary, slo))


def excess(summary: Summary, slo: Slo) -> float:
    """How many times too slow the slowest of the bounded 99th percentiles is: at most 1 where all are met."""
    if not _serves_everybody(summary):
        return math.inf
    return max((one.times_too_slow for one in _bounded(summary, slo)), default=0)


@dataclass(frozen=True)
class Missed:
    """A simulated deployment that misses the objective: how many times too slow, and what it misses in words."""

    excess: float
    said: str

    @classmethod
    def of(cls, deployed: Deployed, summary: Summary, slo: Slo) -> Missed:
        name = f"nearest in the simulator is {name_of(deployed.replica)}, {deployed.gpus} devices in all"
        if summary.rejected:
            return cls(math.inf, f"{name}: it refuses {summary.rejected} of {summary.requests} requests as too long")
        known = [
            (one.times_too_slow, f"p99 {one.metric} of {one.p99_s:.4g} s against {one.bound_s:.4g} s")
            for one in _bounded(summary, slo)
        ]
        excess, said = max(known, default=(math.inf, "nothing was answered"))
        return cls(excess, f"{name}: {said}")
