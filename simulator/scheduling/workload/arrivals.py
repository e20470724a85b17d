"""When do requests arrive, and how long do users think?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from membound.roofline.scenario.workload import (
    ConstantArrivals,
    Duration,
    ExponentialDuration,
    FixedDuration,
    GammaArrivals,
    HourlyArrivals,
    LognormalDuration,
    MmppArrivals,
    OpenArrivals,
    PoissonArrivals,
    SineArrivals,
    TraceArrivals,
)
from membound.simulator.scheduling.workload.streams import CHUNK
from membound.simulator.scheduling.workload.traces import read_trace

Times = NDArray[np.float64]


def arrival_chunks(arrivals: OpenArrivals, rng: np.random.Generator) -> Iterator[Times]:
    """Arrival times in seconds, in order, in chunks; endless except for a trace."""
    match arrivals:
        case ConstantArrivals():
            return (np.arange(first, first + CHUNK) / arrivals.rate_rps for first in itertools.count(0, CHUNK))
        case PoissonArrivals():
            return _summed(lambda: rng.exponential(1 / arrivals.rate_rps, CHUNK))
        case GammaArrivals():
            # shape 1 / cv^2 has that coefficient of variation; the scale makes the mean 1 / rate
            shape = arrivals.cv**-2
            return _summed(lambda: rng.gamma(shape, 1 / (arrivals.rate_rps * shape), CHUNK))
        case MmppArrivals():
            return _mmpp(arrivals, rng)
        case SineArrivals() | HourlyArrivals():
            return _thinned(arrivals, rng)
        case TraceArrivals():
            rows = (row.time_s for row in read_trace(arrivals))
            return (np.fromiter(times, np.float64) / arrivals.speed for times in _batches(rows))


def mean_rate_rps(arrivals: OpenArrivals) -> float | None:
    """Mean arrivals a second in the long run; None for a trace, which has to be read."""
    match arrivals:
        case MmppArrivals():
            # each other state is equally likely next, so every state is visited equally often
            total_s = sum(state.dwell_s for state in arrivals.states)
            return sum(state.rate_rps * state.dwell_s for state in arrivals.states) / total_s
        case HourlyArrivals():
            return sum(arrivals.rates_rps) / len(arrivals.rates_rps)
        case TraceArrivals():
            return None
        case _:
            return arrivals.rate_rps


def period_s(arrivals: SineArrivals | HourlyArrivals) -> float:
    """Seconds after which the rate is what it was."""
    return arrivals.period_s if isinstance(arrivals, SineArrivals) else len(arrivals.rates_rps) * arrivals.part_s


def mean_s(duration: Duration) -> float:
    """The mean of durations in seconds."""
    match duration:
        case FixedDuration():
            return duration.seconds
        case ExponentialDuration():
            return duration.mean_s
        case LognormalDuration():
            return duration.median_s * math.exp(duration.sigma**2 / 2)


def duration_chunks(duration: Duration, rng: np.random.Generator) -> Iterator[Times]:
    """Endless chunks of durations in seconds."""
    while True:
        match duration:
            case FixedDuration():
                yield np.full(CHUNK, duration.seconds)
            case ExponentialDuration():
                yield rng.exponential(duration.mean_s, CHUNK)
            case LognormalDuration():
                yield np.exp(rng.normal(np.log(duration.median_s), duration.sigma, CHUNK))


def _summed(draw_gaps: Callable[[], Times]) -> Iterator[Times]:
    """Times from gaps; summed one after the other, so that the result does not depend on the size of a chunk."""
    last_s = 0.0
    while True:
        times = np.cumsum(np.concatenate(([last_s], draw_gaps())))[1:]
        last_s = times[-1]
        yield times


def _mmpp(arrivals: MmppArrivals, rng: np.random.Generator) -> Iterator[Times]:
    """Unit-rate Poisson arrivals carried back through the integral of the rate, which is exact for any rate.

    Source: Cinlar, Introduction to Stochastic Processes (1975), the time change of a Poisson process.
    """
    rates = np.array([state.rate_rps for state in arrivals.states])
    dwells_s = np.array([state.dwell_s for state in arrivals.states])
    shares = dwells_s / dwells_s.sum()
    state = int(rng.choice(len(rates), p=shares)) if arrivals.first is None else arrivals.first  # of the next stay
    arrivals_a_stay = float(np.mean(rates * dwells_s))
    until_s, expected = np.zeros(1), np.zeros(1)  # ends of stays, and the arrivals expected until then
    for units in _summed(lambda: rng.exponential(1.0, CHUNK)):
        while expected[-1] <= units[-1]:
            stays = 256 + int((units[-1] - expected[-1]) / arrivals_a_stay)
            # a step of 1 .. n - 1 around the circle of states reaches each other state with the same chance
            states = (state + np.cumsum(np.append(0, rng.integers(1, len(rates), stays)))) % len(rates)
            states, state = states[:-1], int(states[-1])
            stays_s = rng.exponential(dwells_s[states])
            until_s = np.concatenate((until_s, until_s[-1] + np.cumsum(stays_s)))
            expected = np.concatenate((expected, expected[-1] + np.cumsum(stays_s * rates[states])))
        yield np.interp(units, expected, until_s)
        passed = int(np.searchsorted(expected, units[-1])) - 1
        until_s, expected = until_s[passed:], expected[passed:]


def _thinned(arrivals: SineArrivals | HourlyArrivals, rng: np.random.Generator) -> Iterator[Times]:
    """Poisson arrivals at the highest rate, each kept with the chance rate / highest rate, which is exact.

    Source: Lewis and Shedler, Naval Research Logistics Quarterly 26 (1979).
    """
    highest = (
        arrivals.rate_rps * (1 + arrivals.swing) if isinstance(arrivals, SineArrivals) else max(arrivals.rates_rps)
    )
    for times in _summed(lambda: rng.exponential(1 / highest, CHUNK)):
        kept = times[rng.random(CHUNK) * highest < rate_rps_at(arrivals, times)]
        if len(kept):
            yield kept


def rate_rps_at(arrivals: SineArrivals | HourlyArrivals, times_s: Times) -> Times:
    """The rate at each time of the run."""
    times_s = times_s + arrivals.start_s
    if isinstance(arrivals, SineArrivals):
        turn = 2 * np.pi * (times_s - arrivals.peak_s) / arrivals.period_s
        return arrivals.rate_rps * (1 + arrivals.swing * np.cos(turn))
    rates = np.array(arrivals.rates_rps)
    return rates[(times_s // arrivals.part_s).astype(np.int64) % len(rates)]


def _batches(values: Iterator[float]) -> Iterator[list[float]]:
    while batch := list(itertools.islice(values, CHUNK)):
        yield batch
