"""The fast loop for ordinary engines makes the decisions of the general one, and writes the same records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator import lockstep
from membound.simulator.lockstep import is_ordinary
from membound.simulator.run import deploy, run
from membound.simulator.scheduling.build import build_scheduler
from membound.simulator.scheduling.recorder import Recorder

COUNTED = ("steps", "drafted", "accepted", "emitted", "moved_blocks", "cached_tokens", "tokens", "sequences")
COUNTED += ("logits_rows", "prefill_tokens", "prefill_sequences", "prefill_kv_tokens", "prefill_attended", "kv_tokens")
COUNTED += ("decode_tokens_within_128", "prefill_tokens_within_128", "prefill_attended_within_128")

ENGINES = st.fixed_dictionaries(
    {
        "batching": st.sampled_from(["static", "continuous", "prefill_first", "chunked_prefill", "chunked_prefill"]),
        "max_num_seqs": st.sampled_from([1, 3, 8, 32]),
        "max_batched_tokens": st.sampled_from([5, 40, 250, 4096]),
        "num_blocks": st.sampled_from([20, 45, 120, 5000]),
        "block_size": st.sampled_from([1, 7, 16]),
        "prefix_caching": st.booleans(),
    }
)
ARRIVALS = st.sampled_from(
    [
        {"kind": "constant", "rate_rps": 50.0},
        {"kind": "poisson", "rate_rps": 3.0},
        {"kind": "poisson", "rate_rps": 40.0},
        {"kind": "poisson", "rate_rps": 1000.0},
        {"kind": "gamma", "rate_rps": 10.0, "cv": 4.0},
    ]
)
# Gaps (0 s: they come at once), prompts and outputs of the rows of a trace.
ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.001, 0.05, 2.0]), st.integers(1, 400), st.integers(1, 120)), min_size=1
)
ENGINE = {
    "batching": "chunked_prefill",
    "max_num_seqs": 8,
    "max_batched_tokens": 40,
    "num_blocks": 45,
    "block_size": 7,
    "prefix_caching": False,
}


def scenario(engine: dict, workload: dict, **changes) -> Scenario:
    document = {"name": "ordinary", "model": "Llama-3.1-8B", "hardware": "H100-SXM5"}
    return parse_scenario(document | {"engine": engine, "workload": workload} | changes)


def drawn(arrivals: dict, seed: int = 0, requests: int = 60) -> dict:
    return {
        "arrivals": arrivals,
        "requests": requests,
        "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 150}},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 90},
        "seed": seed,
    }


def both(chosen: Scenario) -> tuple[RunResult, RunResult]:
    """By the fast loop, and by the general one, which a recorder of the caller's own asks for."""
    deployment, _ = deploy(chosen)
    scheduler = build_scheduler(chosen, deployment.model, deployment.times, deployment.memory, False)
    assert is_ordinary(scheduler, chosen.workload)
    return run(chosen), run(chosen, recorder=Recorder())


def assert_same_records(fast: RunResult, general: RunResult) -> None:
    for name, column in general.requests.items():
        if np.issubdtype(column.dtype, np.floating):
            np.testing.assert_allclose(fast.requests[name], column, rtol=1e-9, atol=1e-12, err_msg=name)
        else:
            np.testing.assert_array_equal(fast.requests[name], column, err_msg=name)
    assert fast.steps.keys() == general.steps.keys()
    for name, column in general.steps.items():
        if name in COUNTED:
            np.testing.assert_array_equal(fast.steps[name], column, err_msg=name)
        else:
            np.testing.assert_allclose(fast.steps[name], column, rtol=1e-9, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(np.sort(fast.itl_s.values()), np.sort(general.itl_s.values()), rtol=1e-9, atol=1e-12)
    assert fast.provenance.notes == general.provenance.notes
    found = fast.summary.model_dump()
    for name, value in general.summary.model_dump().items():
        parts = value if isinstance(value, dict) else {"value": value}
        for part, expected in parts.items():
            one = found[name][part] if isinstance(value, dict) else found[name]
            assert one == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)), (
                name
            )


@settings(deadline=None, max_examples=40)
@given(engine=ENGINES, arrivals=ARRIVALS, seed=st.integers(0, 2**32))
@example(engine=ENGINE, arrivals={"kind": "poisson", "rate_rps": 40.0}, seed=0)
def test_the_fast_loop_writes_the_records_of_the_general_one(engine, arrivals, seed):
    assert_same_records(*both(scenario(engine, drawn(arrivals, seed))))


@settings(deadline=None, max_examples=40)
@given(engine=ENGINES, rows=ROWS)
def test_requests_of_a_trace_that_come_at_once_are_served_alike(tmp_path_factory, engine, rows):
    path, at_s = tmp_path_factory.getbasetemp() / "bursts.csv", 0.0
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    for gap_s, prompt, output in rows:
        at_s += gap_s
        lines.append(f"{at_s},{prompt},{output}")
    path.write_text("\n".join(lines) + "\n")
    chosen = scenario(engine | {"prefix_caching": False}, {"arrivals": {"kind": "trace", "file": str(path)}})
    assert_same_records(*both(chosen))


@settings(deadline=None, max_examples=25)
@given(engine=ENGINES, arrivals=ARRIVALS, seed=st.integers(0, 2**32))
@example(engine=ENGINE, arrivals={"kind": "poisson", "rate_rps": 40.0}, seed=0)
def test_so_it_does_where_layers_look_back_over_a_part_of_each_sequence(engine, arrivals, seed):
    """Some of the sequences are shorter than the window of 128 tokens, some fill it, some are longer from the start."""
    engine = engine | {"prefix_caching": False}
    fast, general = both(scenario(engine, drawn(arrivals, seed), model="gpt-oss-20b"))
    assert_same_records(fast, general)
    assert "decode_tokens_within_128" in fast.steps or not fast.summary.completed


@pytest.mark.parametrize("model, hardware", [("mamba-2.8b", "L4"), ("gemma-2-9b", "H100-SXM5")])
def test_models_whose_caches_grow_otherwise_are_served_alike(model, hardware):
    engine = {"batching": "chunked_prefill", "max_batched_tokens": 100}
    assert_same_records(
        *both(scenario(engine, drawn({"kind": "poisson", "rate_rps": 40.0}), model=model, hardware=hardware))
    )


@pytest.mark.parametrize("batching", ["static", "continuous", "prefill_first", "chunked_prefill"])
def test_small_pools_preempt_and_refuse_in_both_loops(batching):
    engine = ENGINE | {"batching": batching, "max_batched_tokens": 200, "num_blocks": 28}
    fast, general = both(scenario(engine, drawn({"kind": "poisson", "rate_rps": 40.0}, requests=200)))
    assert_same_records(fast, general)
    assert fast.summary.preemptions > 0 < fast.summary.rejected
    assert fast.summary.completed + fast.summary.rejected == 200


def test_what_is_written_in_pieces_is_the_same(monkeypatch):
    chosen = scenario(ENGINE, drawn({"kind": "poisson", "rate_rps": 40.0}))
    whole = run(chosen)
    monkeypatch.setattr(lockstep, "_ROWS", 16)
    assert len(whole.steps["steps"]) > 32
    assert_same_records(run(chosen), whole)


@pytest.mark.parametrize("changes", [{}, {"workload.arrivals": {"kind": "closed_loop", "concurrency": 4}}])
def test_who_watches_a_run_is_told_the_time_and_may_end_it(monkeypatch, changes):
    chosen = scenario(ENGINE, drawn({"kind": "poisson", "rate_rps": 40.0}))
    for path, value in changes.items():
        chosen = chosen.with_value(path, value)
    monkeypatch.setattr(lockstep, "_ROWS", 16)
    told = []
    watched = run(chosen, watch=told.append)
    assert_same_records(watched, run(chosen))
    assert len(told) > 2 and told == sorted(told) and told[-1] <= watched.summary.duration_s

    def end(now_s: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(chosen, watch=end)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"batching": "chunked_prefill", "reserved_tokens": 300}},
        {"engine": {"batching": "chunked_prefill", "reserved_tokens": "oracle"}},
        {"engine": {"batching": "chunked_prefill", "preemption": "swap", "host_kv_gib": 1.0}},
        {"engine": {"batching": "chunked_prefill", "admission": {"max_waiting": 3}}},
        {"engine": {"batching": "chunked_prefill", "classes": [{"name": "a", "share": 1.0}]}},
        {"workload": drawn({"kind": "closed_loop", "concurrency": 4})},
        {"techniques": [{"name": "ngram_speculation"}]},
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_the_general_loop(changes):
    document = scenario(ENGINE, drawn({"kind": "poisson", "rate_rps": 3.0})).model_dump(mode="json")
    chosen = parse_scenario(document | changes)
    deployment, _ = deploy(chosen)
    scheduler = build_scheduler(chosen, deployment.model, deployment.times, deployment.memory, False)
    assert not is_ordinary(scheduler, chosen.workload)
