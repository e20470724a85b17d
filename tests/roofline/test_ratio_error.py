"""A ratio is as sure as what its two times do not share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.parallel import Parallelism
from membound.roofline.ratio_error import Timed, kernels_of, ratio_error
from membound.roofline.techniques import EngineSetup, KvQuantization, WeightQuantization, engine_setup

BOUNDS = ("memory_weights", "memory_kv", "compute", "link", "overhead")
PLAIN, INT4, FP8_KV = (engine_setup(each) for each in ((), (WeightQuantization(),), (KvQuantization(format="fp8"),)))


@st.composite
def shares(draw):
    parts = [draw(st.floats(0.01, 1.0)) for _ in BOUNDS]
    return {bound: part / sum(parts) for bound, part in zip(BOUNDS, parts, strict=True)}


def timed(shares, setup: EngineSetup = PLAIN, sequences: float = 8.0) -> Timed:
    return Timed(shares, kernels_of(setup, "a model", "a device"), sequences)


@given(shares(), st.floats(0.01, 2.0))
def test_the_same_step_is_as_fast_as_itself_for_sure(step, error):
    assert ratio_error(error, timed(step), timed(step), 1.0) == 0.0


@given(shares(), shares(), st.floats(0.01, 2.0), st.floats(0.1, 10.0))
def test_a_ratio_is_never_less_sure_than_a_time_and_the_same_in_both_directions(before, after, error, ratio):
    there = ratio_error(error, timed(before), timed(after, INT4), ratio)
    back = ratio_error(error, timed(after, INT4), timed(before), 1 / ratio)
    assert 0.0 <= there <= error * (1 + 1e-9)
    assert there == pytest.approx(back)


@given(shares(), st.floats(0.01, 2.0))
def test_other_kernels_than_a_change_touches_do_not_widen_its_interval(step, error):
    cache = ratio_error(error, timed(step), timed(step, FP8_KV), 1.0)
    touched = math.hypot(step["memory_kv"], step["compute"])
    assert math.log1p(cache) == pytest.approx(math.log1p(error) * min(1.0, touched * math.sqrt(2)))


@given(shares(), st.floats(0.01, 2.0))
def test_other_batches_and_devices_have_other_kernels(step, error):
    two = EngineSetup(parallel=Parallelism(tp=2))
    assert ratio_error(error, timed(step), timed(step, sequences=16.0), 1.0) == pytest.approx(error)
    assert ratio_error(error, timed(step), timed(step, two), 1.0) >= ratio_error(error, timed(step), timed(step), 1.0)


@given(shares(), st.floats(0.01, 2.0))
def test_what_is_twice_as_fast_by_its_order_of_work_alone_is_as_unsure_as_a_time(step, error):
    assert ratio_error(error, timed(step), timed(step), 2.0) == pytest.approx(error)
