"""Running equal steps as one event changes nothing but the time that it takes to simulate them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run
from membound.simulator.scheduling import recorder

COUNTS = ("id", "prompt_tokens", "output_tokens", "preemptions", "service_class", "completed")
TIMES = ("arrival_s", "admitted_s", "first_token_s", "finished_s")

CLASSES = [{"name": "a", "share": 0.4, "ttft_s": 1.0}, {"name": "b", "share": 0.6, "ttft_s": 9.0}]

ENGINES = st.fixed_dictionaries(
    {
        "batching": st.sampled_from(["static", "continuous", "prefill_first", "chunked_prefill"]),
        "max_num_seqs": st.sampled_from([1, 4, 32]),
        "max_batched_tokens": st.sampled_from([700, 4096]),
        "num_blocks": st.sampled_from([45, 120, 5000]),
        "block_size": st.sampled_from([8, 16]),
    }
)
EXTRAS = st.sampled_from(
    [
        {},
        {"preemption": "swap", "host_kv_gib": 0.1},
        {"reserved_tokens": 300},
        {"reserved_tokens": "pow2"},
        {"reserved_tokens": "oracle"},
        {"reserved_tokens": "pow2", "kv_allocator": "buddy"},
        {"prefix_caching": True},
        {"prefix_caching": True, "host_kv_gib": 0.05},
        {
            "order": "slack",
            "classes": [{"name": "a", "share": 0.4, "ttft_s": 1.0}, {"name": "b", "share": 0.6, "ttft_s": 9.0}],
        },
        {"disaggregation": {"prefill_engines": 1, "decode_engines": 2, "link_bytes_per_s": 2e9}},
        {"disaggregation": {"prefill_engines": 2, "decode_engines": 1, "layerwise": False}},
    ]
)
ARRIVALS = st.sampled_from(
    [
        {"kind": "poisson", "rate_rps": 3.0},
        {"kind": "poisson", "rate_rps": 40.0},
        {"kind": "gamma", "rate_rps": 10.0, "cv": 4.0},
        {"kind": "closed_loop", "concurrency": 5},
        {"kind": "closed_loop", "concurrency": 9, "think": {"kind": "exponential", "mean_s": 0.5}},
    ]
)
PROMPTS = st.sampled_from(
    [
        {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 200}},
        {
            "kind": "sessions",
            "tokens": {"kind": "uniform", "low": 5, "high": 60},
            "turns": {"kind": "geometric", "mean": 3},
            "think": {"kind": "exponential", "mean_s": 1.0},
            "system_tokens": 70,
            "context_limit": 290,
        },
    ]
)


def scenario(engine: dict, arrivals: dict, prompts: dict, seed: int = 0, requests: int = 40) -> Scenario:
    return parse_scenario(
        {
            "name": "macro",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "engine": engine,
            "workload": {
                "arrivals": arrivals,
                "requests": requests,
                "prompts": prompts,
                "output_tokens": {"kind": "uniform", "low": 1, "high": 90},
                "seed": seed,
            },
        }
    )


def assert_equal(one: RunResult, other: RunResult) -> None:
    for name in COUNTS:
        np.testing.assert_array_equal(one.requests[name], other.requests[name])
    for name in TIMES:
        np.testing.assert_allclose(one.requests[name], other.requests[name], rtol=1e-9, atol=1e-12)
    for name in ("steps", "drafted", "accepted", "emitted", "moved_blocks", "cached_tokens"):
        assert one.steps[name].sum() == other.steps[name].sum()
    for name, value in one.summary.model_dump().items():
        expected = other.summary.model_dump()[name]
        if name == "bottleneck_share":  # of the mean step of a row, which can lie beyond a kink
            assert value == pytest.approx(expected, abs=2e-3)
        elif isinstance(value, dict) and None in expected.values():  # nobody was served
            assert value == expected
        elif isinstance(value, dict):
            assert value == pytest.approx(expected, rel=1e-9, nan_ok=True)
        else:
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12))


@settings(deadline=None, max_examples=40)
@given(engine=ENGINES, extra=EXTRAS, arrivals=ARRIVALS, prompts=PROMPTS, seed=st.integers(0, 2**32))
def test_equal_steps_as_one_give_the_records_and_the_summary_of_steps_one_by_one(
    engine, extra, arrivals, prompts, seed
):
    chosen = scenario(engine | extra, arrivals, prompts, seed)
    together, apart = run(chosen), run(chosen, step_by_step=True)
    assert_equal(together, apart)
    assert np.all(apart.steps["steps"] == 1)
    assert together.summary.requests == together.summary.completed + together.summary.rejected


# Layers with a window have no whole blocks to share.
UNSHARED = EXTRAS.filter(lambda extra: "prefix_caching" not in extra)


@settings(deadline=None, max_examples=25)
@given(engine=ENGINES, extra=UNSHARED, arrivals=ARRIVALS, prompts=PROMPTS, seed=st.integers(0, 2**32))
def test_so_they_do_where_layers_look_back_over_a_part_of_each_sequence(engine, extra, arrivals, prompts, seed):
    document = scenario(engine | extra, arrivals, prompts, seed).model_dump(mode="json")
    chosen = parse_scenario(document | {"model": "gpt-oss-20b"})
    together, apart = run(chosen), run(chosen, step_by_step=True)
    assert_equal(together, apart)
    assert np.all(apart.steps["steps"] == 1)


DIVIDED = {
    "stages": {"parallel": {"pp": 2}},
    "one micro-batch": {"parallel": {"pp": 2, "micro_batches": 1}},
    "halves": {"parallel": {"tp": 2}, "techniques": [{"name": "dual_batch_overlap", "decode_tokens": 4}]},
}


@pytest.mark.parametrize("divided", DIVIDED.values(), ids=DIVIDED)
@pytest.mark.parametrize("batching", ["chunked_prefill", "prefill_first"])
def test_so_they_do_where_a_step_is_done_in_parts(divided, batching):
    prompts = {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 900}}
    engine = {"batching": batching, "max_num_seqs": 16, "num_blocks": 300}
    document = scenario(engine, {"kind": "poisson", "rate_rps": 20.0}, prompts).model_dump(mode="json")
    chosen = parse_scenario(document | divided)
    together, apart = run(chosen), run(chosen, step_by_step=True)
    assert_equal(together, apart)
    assert len(together.steps["steps"]) < len(apart.steps["steps"])


def test_rows_that_are_joined_keep_every_sum_and_so_the_summary(monkeypatch):
    chosen = scenario(
        {"batching": "chunked_prefill", "max_num_seqs": 16},
        {"kind": "poisson", "rate_rps": 20.0},
        {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 200}},
        requests=300,
    )
    whole = run(chosen)
    monkeypatch.setattr(recorder, "_CHUNK", 16)
    monkeypatch.setattr(recorder, "MOST_ROWS", 64)
    joined = run(chosen)
    assert len(joined.steps["steps"]) <= 80 < len(whole.steps["steps"])
    assert_equal(whole, joined)
    assert joined.summary.bottleneck_share == pytest.approx(whole.summary.bottleneck_share, rel=1e-9)
    assert np.all(np.diff(joined.steps["start_s"]) > 0)


def test_the_cost_of_a_simulation_grows_with_requests_not_with_tokens():
    """Ten times the output is not twice the work, where one user is served at a time."""
    spent, rows = [], []
    for tokens in (200, 2000):
        prompts = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 50}}
        chosen = scenario({}, {"kind": "closed_loop", "concurrency": 1}, prompts, requests=200)
        chosen = chosen.with_value("workload.output_tokens", {"kind": "fixed", "tokens": tokens})
        begun = time.process_time()
        result = run(chosen)
        spent.append(time.process_time() - begun)
        rows.append(len(result.steps["steps"]))
        assert result.steps["steps"].sum() == 200 * tokens
    assert rows[1] < 4 * rows[0]
    assert spent[1] < 4 * spent[0] + 2.0  # tokens one by one would take ten
