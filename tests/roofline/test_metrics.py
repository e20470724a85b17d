"""The metrics are those that METRICS.md defines, on numbers checked by hand."""

from __future__ import annotations

import re
from importlib import resources

import numpy as np
import pytest

from membound.roofline.results.comparison import gain, spread, verdict
from membound.roofline.results.metrics import summarize
from membound.roofline.results.result import BOUNDS, Summary
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Slo

NAN = float("nan")
REQUESTS = {
    "id": np.array([0, 1, 2]),
    "arrival_s": np.array([0.0, 1.0, 2.0]),
    "admitted_s": np.array([0.0, 1.0, NAN]),
    "first_token_s": np.array([1.0, 4.0, NAN]),
    "finished_s": np.array([5.0, 4.0, NAN]),
    "prompt_tokens": np.array([10, 20, 30]),
    "output_tokens": np.array([5, 1, 0]),
    "preemptions": np.array([1, 0, 0]),
    "completed": np.array([True, True, False]),
}
STEPS = {
    "start_s": np.array([0.0, 1.0]),
    "time_s": np.array([1.0, 4.0]),
    "steps": np.array([1.0, 1.0]),
    "drafted": np.array([0.0, 4.0]),
    "accepted": np.array([0.0, 3.0]),
    "emitted": np.array([1.0, 5.0]),
    "blocks_used": np.array([2.0, 4.0]),
} | {bound: np.array([float(bound == "compute"), float(bound == "memory_kv")]) for bound in BOUNDS}


def summary(slo: Slo = Slo(), **changes) -> Summary:  # noqa: B008 (frozen)
    given = {"duration_s": 10.0, "idle_s": 5.0, "num_blocks": 8} | changes
    return summarize(REQUESTS, STEPS, Samples.of([1.0, 3.0]), slo=slo, **given)


def test_rates_latencies_and_shares():
    s = summary()
    assert (s.requests, s.completed, s.rejected) == (3, 2, 1)
    assert (s.output_tokens_per_s, s.total_tokens_per_s, s.requests_per_s) == pytest.approx((0.6, 3.6, 0.2))
    assert s.ttft_s.mean == 2.0
    assert s.tpot_s.mean == 1.0, "(5 - 1) / 4; the request of one token has none"
    assert s.e2e_s.mean == 4.0 and s.itl_s.p50 == 2.0
    assert s.kv_utilization == pytest.approx((1 * 2 + 4 * 4) / (5 * 8))
    assert s.preemptions == 1 and s.tokens_per_step == 3.0 and s.acceptance_rate == 0.75
    assert s.bottleneck_share == pytest.approx(
        dict.fromkeys(BOUNDS, 0.0) | {"compute": 0.1, "memory_kv": 0.4, "idle": 0.5}
    )
    assert s.energy_j_per_token is None and s.cost_usd_per_million_tokens is None


def test_energy_and_cost_follow_from_power_and_price():
    s = summary(power_w=30.0, price_usd_per_h=3.6)
    assert s.energy_j_per_token == 30 * 10 / 6
    assert s.cost_usd_per_million_tokens == pytest.approx(0.001 * 10 / 6 * 1e6)


@pytest.mark.parametrize(
    ("slo", "good"), [(Slo(), 2), (Slo(ttft_s=1.0), 1), (Slo(tpot_s=0.5), 1), (Slo(ttft_s=1.0, tpot_s=0.5), 0)]
)
def test_goodput_counts_requests_that_meet_every_bound(slo, good):
    s = summary(slo)
    assert s.goodput_rps == good / 10 and s.slo_attainment == pytest.approx(good / 3)


def test_a_gain_is_above_one_when_times_fall_or_rates_rise():
    slow, fast = summary(), summary(duration_s=5.0)
    assert gain(slow, fast, "output_tokens_per_s") == 2.0
    assert gain(slow, slow, "tpot_s") == 1.0


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([1.5, 1.6, 1.7], "gain"),
        ([0.5, 0.6, 0.7], "loss"),
        ([0.9, 1.05, 1.2], "no difference"),
        ([1.5], "no difference"),
        ([], "not measured"),
    ],
)
def test_a_difference_within_the_spread_is_not_a_gain(samples, said):
    assert verdict(samples) == said


def test_spread_is_half_the_range():
    assert spread([1.0, 1.2, 1.1]) == pytest.approx(0.1) and spread([1.0]) is None


def test_every_key_of_the_summary_is_defined_in_words():
    words = (resources.files("membound.roofline") / "METRICS.md").read_text("utf-8")
    defined = set(re.findall(r"`(\w+)`", words))
    assert set(Summary.model_fields) <= defined
