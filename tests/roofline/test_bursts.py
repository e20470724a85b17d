"""Requests that are all there at once: how long the last of them takes."""

from __future__ import annotations

import numpy as np
import pytest

from membound.roofline.bursts import Burst
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.serving import Deployment, StaticBatch
from membound.roofline.techniques import EngineSetup

H100 = Deployment(get_model("Llama-3.1-8B"), get_hardware("H100-SXM5"), EngineSetup())


def burst(requests: float, places: float, output: float = 200.0) -> Burst:
    return Burst(H100, requests, places, 220.0, output)


def test_one_request_takes_what_it_takes_alone():
    alone = burst(1, 1)
    assert alone.emptying_s == pytest.approx(200.0 * H100.decode_s(1.0, 220.0 + 200.5))
    token_s = StaticBatch(H100, 1, 220.0, 400.0).tpot_s  # half way through which is the mean of exponential outputs
    assert alone.latency_s == pytest.approx(200.0 * token_s + H100.prefill_s(1, 220.0))


def test_places_empty_as_those_of_exponential_outputs_do():
    """Against drawn lengths: seconds between two ends are those of a step with as many sequences as are left."""
    lengths = np.sort(np.random.default_rng(0).exponential(200.0, (400, 64)), axis=1)
    left = np.arange(64.0, 0.0, -1.0)
    steps_s = np.array([H100.decode_s(n, 220.0 + 200.5) for n in left])
    drawn_s = (np.diff(lengths, axis=1, prepend=0.0) * steps_s).sum(axis=1)
    assert burst(64, 64).emptying_s == pytest.approx(drawn_s.mean(), rel=0.05)


def test_what_waits_takes_its_share_of_full_steps_and_many_requests_hide_the_end():
    each_s = burst(101, 100).latency_s - burst(100, 100).latency_s
    assert burst(200, 100).latency_s - burst(100, 100).latency_s == pytest.approx(100 * each_s)
    long = burst(50_000, 100)
    assert burst(500, 100).output_tokens_per_s < long.output_tokens_per_s < 200.0 / each_s
    assert long.output_tokens_per_s == pytest.approx(200.0 / each_s, rel=0.01)


def test_a_burst_is_slower_than_requests_of_equal_length_and_no_faster_with_fewer_places():
    waves = StaticBatch(H100, 256, 220.0, 200.0)
    assert burst(256, 256).output_tokens_per_s < waves.output_tokens_per_s
    rates = [burst(512, places).output_tokens_per_s for places in (16, 64, 256, 512)]
    assert rates == sorted(rates)
