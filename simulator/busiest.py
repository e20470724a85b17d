"""Which part of varying arrivals must an engine be sized for, and how is just that part simulated?

A run of a few thousand requests covers minutes of a day, and the minutes of the night say nothing about the afternoon.
If a run would cover only a part of how arrivals vary, the busiest part is taken. Plans, stacks and advice use the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import (
    Arrivals,
    HourlyArrivals,
    MmppArrivals,
    OpenArrivals,
    SineArrivals,
    TraceArrivals,
    Workload,
)
from membound.simulator.load import recorded_times_s, turns_of
from membound.simulator.scheduling.workload.arrivals import mean_rate_rps, period_s
from membound.simulator.scheduling.workload.covered import DAY_S, clock

# Requests of one engine that are enough for a 99th percentile: those of a trace that says no number of its own.
ENOUGH_REQUESTS = 4000
# Periods or rounds of states of which a run sees the busiest part as often as it comes.
ALL_OF_IT = 10.0


@dataclass(frozen=True)
class BusiestPart:
    """The part in which most requests arrive: the rate, when it is in words, and arrivals that begin there."""

    rate_rps: float
    when: str
    arrivals: OpenArrivals


def requests_seen(workload: Workload) -> int:
    """Requests that a run of the workload covers; a default if the workload names no number, as a trace may be huge."""
    return ENOUGH_REQUESTS if workload.requests is None else workload.requests


def at_its_busiest(scenario: Scenario) -> Scenario:
    """The scenario with its requests around the busiest moment, if they do not cover all of how arrivals vary."""
    requests = requests_seen(scenario.workload)
    part = busiest_of(scenario.workload, requests)
    changes = {"requests": requests} | ({} if part is None else {"arrivals": part.arrivals.model_dump(mode="json")})
    return scenario.with_value("workload", scenario.workload.model_dump(mode="json") | changes)


def busiest_of(workload: Workload, requests: int) -> BusiestPart | None:
    """The busiest part, with arrivals shifted such that `requests` requests lie around its middle.

    None if arrivals do not vary, or if so many requests cover all of their variation. An arrival of a conversation
    counts with all its turns.
    """
    turns = turns_of(workload)
    part = _part(workload.arrivals, math.ceil(requests / turns))
    return part if part is None else replace(part, rate_rps=part.rate_rps * turns)


def _part(arrivals: Arrivals, requests: int) -> BusiestPart | None:
    match arrivals:
        case SineArrivals(rate_rps=mean, swing=swing, peak_s=peak_s):
            return _of_a_period(arrivals, requests, mean * (1.0 + swing), peak_s % period_s(arrivals))
        case HourlyArrivals(rates_rps=rates, part_s=part_s):
            return _of_a_period(arrivals, requests, max(rates), (rates.index(max(rates)) + 0.5) * part_s)
        case MmppArrivals(states=states):
            busiest = max(range(len(states)), key=lambda index: states[index].rate_rps)
            round_s, expected = sum(s.dwell_s for s in states), sum(s.rate_rps * s.dwell_s for s in states)
            peak = states[busiest].rate_rps
            if peak * round_s <= expected * (1.0 + 1e-9) or requests >= ALL_OF_IT * expected:
                return None
            when = f"in the busiest state, of {states[busiest].dwell_s:g} s"
            return BusiestPart(peak, when, arrivals.model_copy(update={"first": busiest}))
        case TraceArrivals():
            return _of_a_trace(arrivals, requests)
        case _:
            return None


def _of_a_period(
    arrivals: SineArrivals | HourlyArrivals, requests: int, peak: float, middle_s: float
) -> BusiestPart | None:
    mean, whole_s = mean_rate_rps(arrivals), period_s(arrivals)
    assert mean is not None, "what has a period has a mean"
    if peak <= mean * (1.0 + 1e-9) or requests >= ALL_OF_IT * mean * whole_s:
        return None
    begin_s = (middle_s - requests / peak / 2.0) % whole_s
    when = f"at {clock(middle_s)}" if whole_s == DAY_S else f"at {middle_s:g} s of each {whole_s:g} s"
    return BusiestPart(peak, when, arrivals.model_copy(update={"start_s": begin_s}))


def _of_a_trace(arrivals: TraceArrivals, requests: int) -> BusiestPart | None:
    """The rows of the trace, as many as are simulated, that came in the shortest time."""
    times_s = recorded_times_s(arrivals)
    if requests < 2 or len(times_s) <= requests:
        return None
    spans_s = times_s[requests - 1 :] - times_s[: len(times_s) - requests + 1]
    first = int(np.argmin(spans_s))
    if spans_s[first] <= 0:
        return None
    begin_s = float(times_s[first])
    rest_s = None if arrivals.duration_s is None else arrivals.duration_s - begin_s
    window = {"start_s": arrivals.start_s + begin_s, "duration_s": rest_s}
    rate = (requests - 1) / float(spans_s[first]) * arrivals.speed
    return BusiestPart(rate, f"from {window['start_s']:g} s of the trace on", arrivals.model_copy(update=window))
