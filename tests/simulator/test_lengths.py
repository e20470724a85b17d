"""Lengths follow their distribution, and inputs and outputs are correlated as asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy import stats

from membound.roofline.scenario.workload import Length
from membound.simulator.scheduling.workload.lengths import LengthSampler, pair_chunks
from membound.simulator.scheduling.workload.streams import stream

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{second:02d}+00:00,{100 + 7 * second},{1 + second % 3}\n" for second in range(60)
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("traces") / "azure.csv"
    path.write_text(TRACE)
    return str(path)


def length(**fields) -> Length:
    return TypeAdapter(Length).validate_python(fields)


KINDS = {
    "fixed": {"tokens": 7},
    "uniform": {"low": 10, "high": 500},
    "lognormal": {"median": 300, "sigma": 0.8, "high": 5000},
    "quantiles": {"shares": [0, 0.25, 0.5, 1], "tokens": [5, 50, 400, 2000]},
    "histogram": {"edges": [1, 10, 100, 1000], "counts": [2, 0, 6]},
    "trace": {"column": "input"},
}


def sampler(kind: str, trace: str) -> LengthSampler:
    fields = KINDS[kind] | ({"file": trace} if kind == "trace" else {})
    return LengthSampler(length(kind=kind, **fields))


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_of_drawing_give_the_same_distribution(kind, trace):
    """Directly, and through the normal distribution as correlated lengths are drawn."""
    rng = np.random.default_rng(3)
    lengths = sampler(kind, trace)
    direct, joined = lengths.draw(40_000, rng), lengths.from_normal(rng.standard_normal(40_000))
    assert direct.dtype == joined.dtype == np.int64
    shares = np.linspace(0.02, 0.98, 25)
    np.testing.assert_allclose(np.quantile(direct, shares), np.quantile(joined, shares), rtol=0.08, atol=1)


def test_each_kind_stays_in_its_range_and_hits_its_quantiles(trace):
    rng = np.random.default_rng(4)
    uniform = sampler("uniform", trace).draw(50_000, rng)
    assert (uniform.min(), uniform.max()) == (10, 500)
    lognormal = sampler("lognormal", trace).draw(50_000, rng)
    assert np.median(lognormal) == pytest.approx(300, rel=0.03) and lognormal.max() <= 5000
    drawn = sampler("quantiles", trace).draw(50_000, rng)
    np.testing.assert_allclose(np.quantile(drawn, [0.25, 0.5]), [50, 400], rtol=0.1)
    drawn = sampler("histogram", trace).draw(50_000, rng)
    assert not np.any((drawn >= 10) & (drawn < 100)), "nobody is in the empty bin"
    assert np.mean(drawn < 10) == pytest.approx(0.25, abs=0.01)
    assert (drawn.min(), drawn.max()) == (1, 999)


def test_lengths_of_a_trace_are_its_own(trace):
    drawn = sampler("trace", trace).draw(30_000, np.random.default_rng(5))
    values, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(values, 100 + 7 * np.arange(60))
    assert stats.chisquare(counts).pvalue > 1e-3


@settings(max_examples=15)
@given(rho=st.floats(-0.95, 0.95).filter(lambda rho: abs(rho) > 0.05), seed=st.integers(0, 1000))
def test_the_rank_correlation_is_the_one_asked_for(rho, seed):
    """Within four standard errors of a Spearman correlation, (1 - rho^2) / sqrt(n) and a little for ties."""
    prompt, output = length(kind="lognormal", median=2000, sigma=1), length(kind="uniform", low=1, high=4000)
    pairs = list(itertools.islice(pair_chunks(prompt, output, rho, stream(seed, "lengths")), 4))
    first, second = (np.concatenate(column) for column in zip(*pairs, strict=True))
    assert stats.spearmanr(first, second).statistic == pytest.approx(rho, abs=0.005 + 4 / np.sqrt(len(first)))


def test_correlation_leaves_each_distribution_as_it_is():
    prompt, output = length(kind="lognormal", median=300, sigma=0.8), length(kind="uniform", low=1, high=100)
    with_it, without = (
        np.concatenate(list(itertools.islice(pair_chunks(prompt, output, rho, stream(7, "lengths")), 6)), axis=1)
        for rho in (0.9, 0.0)
    )
    for i in (0, 1):
        assert stats.ks_2samp(with_it[i], without[i]).pvalue > 1e-3
    assert abs(stats.spearmanr(*without).statistic) < 0.02
