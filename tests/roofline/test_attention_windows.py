"""Which query-key pairs does a layer with a window compute?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.shape import StepShape


def counted(new: int, cached: int, window: int) -> int:
    """Pairs one by one: the i-th new token sees itself and what came before, at most `window` tokens."""
    return sum(min(cached + i, window) for i in range(1, new + 1))


@given(sequences=st.integers(1, 5), new=st.integers(1, 300), cached=st.integers(0, 300), window=st.integers(1, 400))
@settings(max_examples=200)
def test_pairs_under_a_window_are_those_that_are_counted(sequences, new, cached, window):
    chunk = StepShape.prefill(float(sequences), float(new), float(cached)).prefill_part.windowed(window)
    assert chunk.attended == pytest.approx(sequences * counted(new, cached, window), rel=1e-9)
    verify = StepShape.verify(float(sequences), float(new + cached), float(new - 1)).decode_part.windowed(window)
    assert verify.attended == pytest.approx(sequences * counted(new, cached, window), rel=1e-9)


@given(new=st.integers(1, 10_000), window=st.integers(1, 10_000))
def test_a_prompt_longer_than_the_window_has_a_triangle_and_a_band(new, window):
    pairs = StepShape.prefill(1.0, float(new)).prefill_part.windowed(window).attended
    whole = new * (new + 1) / 2
    assert pairs == pytest.approx(new * window - window * (window - 1) / 2 if new > window else whole)


def test_windows_of_many_steps_at_once_are_those_of_each():
    new, cached = np.array([1.0, 40.0, 700.0, 700.0]), np.array([5.0, 0.0, 0.0, 900.0])
    together = StepShape.prefill(np.ones(4), new, cached).prefill_part.windowed(256).attended
    assert together == pytest.approx([counted(int(q), int(p), 256) for q, p in zip(new, cached, strict=True)])
