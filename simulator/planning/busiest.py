"""Which part of its arrivals must a deployment be sized for, and how is it the one that is simulated?

Some thousand requests are minutes of a day: those of the night say nothing about two in the afternoon. Where a run
would see only a part of how arrivals vary, that is the busiest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from membound.roofline.scenario.workload import (
    Arrivals,
    HourlyArrivals,
    MmppArrivals,
    OpenArrivals,
    SineArrivals,
    TraceArrivals,
    Workload,
)
from membound.simulator.scheduling.workload.arrivals import mean_rate_rps, period_s
from membound.simulator.scheduling.workload.covered import DAY_S, clock
from membound.simulator.scheduling.workload.traces import read_trace
from membound.simulator.steady import turns_of

# Periods or rounds of states of which a run sees the busiest part as often as it comes.
ALL_OF_IT = 10.0


@dataclass(frozen=True)
class BusiestPart:
    """The part in which most requests come: how many a second, when in words, and the arrivals from there on."""

    rate_rps: float
    when: str
    arrivals: OpenArrivals


def busiest_of(workload: Workload, requests: int) -> BusiestPart | None:
    """The busiest part, with the arrivals so that `requests` requests are around its middle.

    None where arrivals are alike at all times, or where a run of so many requests sees all that they do. Of
    conversations an arrival brings all turns.
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
    times_s = _times_s(arrivals.model_copy(update={"speed": 1.0}))
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


@lru_cache(maxsize=4)
def _times_s(trace: TraceArrivals) -> NDArray[np.float64]:
    return np.fromiter((row.time_s for row in read_trace(trace)), np.float64)
