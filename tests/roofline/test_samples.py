"""Weighted ramps have the mean and the percentiles of the values that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.results import samples as module
from membound.roofline.results.samples import Samples

RAMPS = st.lists(
    st.tuples(st.floats(-1.0, 10.0), st.floats(-0.1, 0.1), st.integers(1, 40), st.integers(1, 5)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=150)
@given(ramps=RAMPS, percents=st.lists(st.floats(0, 100), min_size=1, max_size=4), chunk=st.sampled_from([8, 1 << 20]))
def test_percentiles_and_mean_are_those_of_the_values(ramps, percents, chunk):
    samples = Samples()
    for first, slope, count, weight in ramps:
        samples.add(first, weight, count, slope)
    values = np.concatenate([np.repeat(f + s * np.arange(c), w) for f, s, c, w in ramps])
    before, module._CHUNK = module._CHUNK, chunk
    try:
        assert len(samples) == len(values)
        assert samples.percentiles(percents) == pytest.approx(
            list(np.percentile(values, percents)), rel=1e-12, abs=1e-12
        )
        assert samples.mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(np.sort(samples.values()), np.sort(values), rtol=1e-12, atol=1e-12)
    finally:
        module._CHUNK = before


def test_no_samples_have_no_distribution():
    assert Samples().percentiles([50, 99]) == [None, None] and Samples().mean is None and len(Samples()) == 0


def test_equal_values_and_zeros_are_values():
    assert Samples.of([2.0, 2.0, 2.0]).percentiles([0, 50, 100]) == [2.0, 2.0, 2.0]
    assert Samples.of([0.0, 1.0]).percentiles([50]) == [0.5]
