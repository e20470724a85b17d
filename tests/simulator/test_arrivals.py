"""Arrivals have the rates and the burstiness that were asked for, whatever the length of the run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy import stats

from membound.roofline.scenario.workload import Arrivals, Duration
from membound.simulator.scheduling.workload.arrivals import (
    arrival_chunks,
    duration_chunks,
    mean_rate_rps,
    rate_rps_at,
)
from membound.simulator.scheduling.workload.streams import Column, stream

KINDS = {
    "constant": {"rate_rps": 4.0},
    "poisson": {"rate_rps": 4.0},
    "gamma": {"rate_rps": 4.0, "cv": 3.0},
    "mmpp": {"states": [{"rate_rps": 1.0, "dwell_s": 20.0}, {"rate_rps": 16.0, "dwell_s": 5.0}]},
    "sine": {"rate_rps": 4.0, "swing": 0.8, "period_s": 500.0, "peak_s": 100.0},
    "hourly": {"rates_rps": [0.0, 2.0, 10.0], "part_s": 60.0},
}


def arrivals_of(kind: str, **changes):
    return TypeAdapter(Arrivals).validate_python({"kind": kind, **KINDS[kind], **changes})


def times_of(kind: str, count: int, seed: int = 5, **changes) -> np.ndarray:
    return Column(arrival_chunks(arrivals_of(kind, **changes), stream(seed, "arrivals"))).take(count)


@pytest.mark.parametrize("kind", KINDS)
def test_times_are_in_order_and_have_the_mean_rate(kind):
    times = times_of(kind, 200_000)
    assert np.all(np.diff(times) >= 0) and times[0] >= 0
    assert len(times) / times[-1] == pytest.approx(mean_rate_rps(arrivals_of(kind)), rel=0.02)


@settings(max_examples=20)
@given(kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 2**63 - 1), short=st.integers(1, 20_000))
def test_a_longer_run_begins_with_the_shorter_one(kind, seed, short):
    np.testing.assert_array_equal(times_of(kind, short, seed), times_of(kind, 20_000, seed)[:short])


def test_seeds_differ():
    assert not np.array_equal(times_of("poisson", 10, seed=1), times_of("poisson", 10, seed=2))


@pytest.mark.parametrize(
    ("kind", "changes", "cv"), [("poisson", {}, 1), ("gamma", {"cv": 3}, 3), ("gamma", {"cv": 0.5}, 0.5)]
)
def test_gaps_have_the_coefficient_of_variation(kind, changes, cv):
    gaps = np.diff(times_of(kind, 400_000, **changes))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)


def test_gamma_with_a_cv_of_one_is_poisson():
    gaps = np.diff(times_of("gamma", 20_000, cv=1.0))
    assert stats.kstest(gaps, "expon", args=(0, 1 / 4.0)).pvalue > 1e-3


def test_modulated_arrivals_have_the_dispersion_of_the_two_state_formula():
    """Variance over mean of counts in long windows: 1 + 2 p1 p2 (r1 - r2)^2 / (mean (q1 + q2)).

    Source: Fischer and Meier-Hellstern, The Markov-modulated Poisson process cookbook (1993), from the
    autocovariance p1 p2 (r1 - r2)^2 exp(-(q1 + q2) t) of the rate.
    """
    rates, dwells_s = np.array([1.0, 16.0]), np.array([20.0, 5.0])
    shares, leaves = dwells_s / dwells_s.sum(), 1 / dwells_s
    mean = rates @ shares
    dispersion = 1 + 2 * shares.prod() * (rates[0] - rates[1]) ** 2 / (mean * leaves.sum())
    window_s = 400.0  # 100 times the relaxation time 1 / (q1 + q2)
    measured = []
    for seed in range(4):
        times = times_of("mmpp", 400_000, seed)
        counts = np.histogram(times, np.arange(0, times[-1], window_s))[0]
        measured.append(counts.var() / counts.mean())
    assert np.mean(measured) == pytest.approx(dispersion, rel=0.1)


def test_three_states_are_visited_equally_often():
    states = [{"rate_rps": rate, "dwell_s": 10.0} for rate in (1.0, 10.0, 100.0)]
    times = times_of("mmpp", 400_000, states=states)
    assert len(times) / times[-1] == pytest.approx(111 / 3, rel=0.05)


@pytest.mark.parametrize("kind", ["sine", "hourly"])
def test_thinned_arrivals_follow_the_rate_over_the_period(kind):
    """Exact thinning: the counts of the parts of a period are Poisson with the integral of the rate (chi-square)."""
    arrivals = arrivals_of(kind)
    period_s = 500.0 if kind == "sine" else 180.0
    times = times_of(kind, 100_000)
    periods = int(times[-1] // period_s)
    parts = 30
    counts = np.histogram(times[times < periods * period_s] % period_s, parts, (0, period_s))[0]
    centres = (np.arange(parts * 100) + 0.5) * period_s / (parts * 100)
    expected = rate_rps_at(arrivals, centres).reshape(parts, 100).mean(1) * periods * period_s / parts
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert stats.chi2.sf(np.sum((counts - expected) ** 2 / expected), len(counts)) > 1e-3


@pytest.mark.parametrize(("kind", "start_s"), [("sine", 350.0), ("hourly", 130.0)])
def test_a_run_may_begin_at_any_time_of_the_period(kind, start_s):
    """Then the rate is that of a run from 0 so much later."""
    late, at = arrivals_of(kind, start_s=start_s), np.linspace(0.0, 900.0, 91)
    np.testing.assert_allclose(rate_rps_at(late, at), rate_rps_at(arrivals_of(kind), at + start_s))
    begun = [np.searchsorted(times_of(kind, 2000, seed, start_s=start_s), 40.0) for seed in range(60)]
    expected = rate_rps_at(late, np.linspace(0.0, 40.0, 401)).mean() * 40.0
    assert np.mean(begun) == pytest.approx(expected, abs=4 * np.sqrt(expected / 60))


@pytest.mark.parametrize("first", [None, 0, 1])
def test_modulated_arrivals_begin_in_the_state_that_is_given_or_in_each_by_its_share(first):
    """In a moment that is short beside all stays the rate is that of the state; without one it is the mean rate."""
    states = [{"rate_rps": 2.0, "dwell_s": 3000.0}, {"rate_rps": 50.0, "dwell_s": 1000.0}]
    begun = [np.searchsorted(times_of("mmpp", 500, seed, states=states, first=first), 4.0) for seed in range(400)]
    expected, spread = (14.0 * 4, 24.0 * 4) if first is None else (states[first]["rate_rps"] * 4, 16.0)
    assert np.mean(begun) == pytest.approx(expected, abs=4 * spread / np.sqrt(400))


def test_a_state_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="first is 2, but states has 2; give 0 to 1"):
        arrivals_of("mmpp", first=2)


def test_constant_arrivals_are_evenly_spaced_from_zero():
    np.testing.assert_allclose(times_of("constant", 20_000), np.arange(20_000) / 4.0)


@pytest.mark.parametrize(
    ("duration", "mean_s"),
    [
        ({"kind": "fixed", "seconds": 3.0}, 3.0),
        ({"kind": "exponential", "mean_s": 3.0}, 3.0),
        ({"kind": "lognormal", "median_s": 3.0, "sigma": 0.5}, 3.0 * np.exp(0.125)),
    ],
)
def test_thinking_takes_its_mean(duration, mean_s):
    chunks = duration_chunks(TypeAdapter(Duration).validate_python(duration), stream(1, "thinks"))
    drawn = np.concatenate(list(itertools.islice(chunks, 20)))
    assert drawn.mean() == pytest.approx(mean_s, rel=0.02) and np.all(drawn >= 0)
