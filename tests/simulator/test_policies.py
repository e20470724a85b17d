"""Each policy keeps the promise that it is named for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run

CLASSES = [
    {"name": "urgent", "share": 0.5, "priority": 0, "ttft_s": 0.3},
    {"name": "patient", "share": 0.5, "priority": 5, "ttft_s": 30.0},
]


def scenario(rate_rps: float = 20.0, requests: int = 300, slo: dict | None = None, **engine) -> Scenario:
    return parse_scenario(
        {
            "name": "policies",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "engine": {"max_num_seqs": 32, "max_batched_tokens": 1024, "batching": "chunked_prefill"} | engine,
            "slo": slo or {},
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": rate_rps},
                "requests": requests,
                "prompts": {
                    "kind": "synthetic",
                    "tokens": {"kind": "lognormal", "median": 200, "sigma": 0.8, "high": 900},
                },
                "output_tokens": {"kind": "uniform", "low": 8, "high": 80},
                "seed": 5,
            },
        }
    )


def waited_s(result: RunResult, service_class: int | None = None) -> np.ndarray:
    chosen = result.requests["completed"].copy()
    if service_class is not None:
        chosen &= result.requests["service_class"] == service_class
    return (result.requests["first_token_s"] - result.requests["arrival_s"])[chosen]


@pytest.mark.parametrize("batching", ["static", "continuous", "prefill_first", "chunked_prefill"])
def test_first_come_is_first_begun(batching):
    table = run(scenario(40.0, batching=batching)).requests
    by_arrival = np.argsort(table["arrival_s"], kind="stable")
    assert np.all(np.diff(table["admitted_s"][by_arrival]) >= 0)


def test_with_a_large_budget_chunks_are_whole_prompts():
    whole = run(scenario(batching="continuous", max_batched_tokens=100_000))
    chunked = run(scenario(batching="chunked_prefill", max_batched_tokens=100_000))
    assert whole.summary == chunked.summary
    for name, column in whole.requests.items():
        np.testing.assert_array_equal(column, chunked.requests[name])


def test_chunks_bound_what_a_long_prompt_costs_those_that_decode():
    """The longest gap between tokens is a step of the budget; with whole prompts it is one of the longest prompt."""
    long = {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 100, "high": 12_000}}
    gaps = {}
    for batching, budget in (("chunked_prefill", 256), ("continuous", 20_000), ("prefill_first", 20_000)):
        chosen = scenario(2.0, 120, batching=batching, max_batched_tokens=budget, max_num_seqs=32)
        result = run(chosen.with_value("workload.prompts", long))
        gaps[batching] = result.itl_s.percentiles([100])[0]
        assert result.summary.completed == 120, "a prompt longer than the budget is served in chunks"
        if batching == "chunked_prefill":
            assert result.steps["tokens"].max() <= 256
            assert gaps[batching] == pytest.approx(result.steps["time_s"][result.steps["steps"] == 1].max(), rel=0.01)
    assert gaps["chunked_prefill"] < gaps["continuous"] / 5
    assert gaps["prefill_first"] >= gaps["continuous"] / 2


def test_prefill_first_never_mixes_and_the_others_do():
    alone, mixed = (run(scenario(batching=name)).steps for name in ("prefill_first", "continuous"))
    for steps, mixes in ((alone, False), (mixed, True)):
        prompts = steps["prefill_sequences"] > 0
        assert np.any(steps["sequences"][prompts] > steps["prefill_sequences"][prompts]) == mixes


def test_a_request_longer_than_the_budget_needs_chunks():
    long = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 2000}}
    for batching, completed in (("continuous", 0), ("chunked_prefill", 300), ("prefill_first", 300), ("static", 300)):
        asked = scenario(batching=batching).with_value("workload.prompts", long)
        result = run(asked)
        assert result.summary.completed == completed
        if completed:
            assert result.steps["tokens"].max() <= asked.engine.max_batched_tokens


def overloaded(**engine) -> RunResult:
    """More than the engine can serve arrives for a while."""
    return run(scenario(120.0, 1200, classes=CLASSES, **engine))


def test_priority_serves_the_urgent_first_and_ageing_lets_nobody_starve():
    first_come = overloaded()
    strict = overloaded(order="priority", ageing_s=1e6)
    ageing = overloaded(order="priority", ageing_s=0.5)
    assert waited_s(strict, 0).max() < 0.3 * waited_s(first_come, 0).max()
    # What is ahead of a patient request when all urgent ones go first: everything that is urgent, however late.
    last_urgent = strict.requests["admitted_s"][strict.requests["service_class"] == 0].max()
    table = strict.requests
    early = (table["service_class"] == 1) & (table["arrival_s"] < 0.3 * table["arrival_s"].max())
    assert np.sum(table["admitted_s"][early] > last_urgent) > 10, "without ageing early ones wait for the last urgent"
    # With ageing nobody is overtaken by those who arrive more than 5 x 0.5 s later, whatever their priority.
    table = ageing.requests
    key = table["arrival_s"] + 0.5 * 5 * (table["service_class"] == 1)
    behind = key[:, None] < key[None, :]
    overtaken = table["admitted_s"][:, None] > table["admitted_s"][None, :]
    was_there = table["arrival_s"][:, None] <= table["admitted_s"][None, :]
    assert not np.any(behind & overtaken & was_there)
    assert first_come.summary.completed == strict.summary.completed == ageing.summary.completed == 1200


def test_a_run_tells_how_each_class_was_served():
    strict = overloaded(order="priority", ageing_s=1e6)
    urgent, patient = strict.to_json()["classes"]
    summary, table = strict.summary, strict.requests
    assert [urgent["name"], patient["name"]] == [one["name"] for one in CLASSES]
    for field in ("requests", "completed", "preemptions"):
        assert urgent[field] + patient[field] == getattr(summary, field)
    assert urgent["ttft_s"]["p99"] < patient["ttft_s"]["p50"], "whoever is urgent does not wait for the others"
    shares = [one["completed"] / summary.completed for one in (urgent, patient)]
    means_s = [one["ttft_s"]["mean"] for one in (urgent, patient)]
    assert np.dot(shares, means_s) == pytest.approx(summary.ttft_s.mean)
    for index, (one, told) in enumerate(zip(CLASSES, (urgent, patient), strict=True)):
        ttft_s = (table["first_token_s"] - table["arrival_s"])[table["service_class"] == index]
        assert told["slo_attainment"] == pytest.approx(np.mean(ttft_s <= one["ttft_s"]))
    assert "classes" not in run(scenario(120.0, 12)).to_json()


def test_deadlines_are_met_more_often_by_those_orders_that_look_at_them():
    """Bursts that the engine can serve within the patient's deadlines, but not all within the urgent ones'."""
    met = {}
    for order in ("fcfs", "deadline", "slack"):
        result = overloaded(order=order)
        due = np.where(result.requests["service_class"] == 0, 0.3, 30.0)
        met[order] = np.mean(result.requests["first_token_s"] - result.requests["arrival_s"] <= due)
    assert met["deadline"] > met["fcfs"] + 0.2
    assert met["slack"] > met["fcfs"] + 0.2


def test_an_admission_that_limits_the_queue_bounds_the_wait_and_says_why():
    free = overloaded()
    limited = overloaded(admission={"max_waiting": 8})
    assert limited.summary.rejected > 0
    assert limited.summary.completed + limited.summary.rejected == 1200
    assert any("because 8 requests wait, and at most 8 may" in note for note in limited.provenance.notes)
    assert waited_s(limited).max() < 0.3 * waited_s(free).max()


def test_an_admission_in_time_turns_away_only_who_would_be_late():
    calm = run(scenario(5.0, slo={"ttft_s": 10.0}, admission={"only_in_time": True}))
    assert calm.summary.rejected == 0
    hard = run(scenario(200.0, 1000, slo={"ttft_s": 0.5}, admission={"only_in_time": True}))
    free = run(scenario(200.0, 1000, slo={"ttft_s": 0.5}))
    assert hard.summary.rejected > 100
    assert hard.summary.goodput_rps > free.summary.goodput_rps


@pytest.mark.parametrize("order", ["fcfs", "priority", "deadline", "slack"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["continuous", "prefill_first", "chunked_prefill"])
def test_every_request_ends_and_the_same_scenario_gives_the_same_records(order, preemption, batching):
    host = {"host_kv_gib": 0.05} if preemption == "swap" else {}
    engine = {"order": order, "preemption": preemption, "batching": batching, "num_blocks": 220, "classes": CLASSES}
    first, second = (run(scenario(60.0, 150, **engine, **host)) for _ in range(2))
    assert first.summary.completed == 150 and first.summary.preemptions > 0
    assert first.requests["output_tokens"].sum() == first.steps["emitted"].sum()
    assert first.summary == second.summary
    assert (first.steps["moved_blocks"].sum() > 0) == (preemption == "swap")
    names = ("arrival_s", "admitted_s", "first_token_s", "finished_s")
    for before, after in itertools.pairwise(names):
        assert np.all(first.requests[before] <= first.requests[after])


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"order": "priority"}, "classes name fewer than two priorities"),
        ({"order": "deadline"}, "give slo.ttft_s, or ttft_s in each of engine.classes"),
        ({"ageing_s": 3.0}, "only 'priority' ages"),
        ({"preemption": "swap"}, "say how much host memory"),
        ({"host_kv_gib": 1.0}, "nothing is put there"),
        ({"classes": [{"name": "a", "share": 0.5}]}, "shares of classes sum to 0.5"),
        ({"admission": {}}, "it changes nothing"),
        ({"reserved_tokens": 4096, "prefix_caching": True}, "exclude each other"),
    ],
)
def test_settings_without_effect_or_that_contradict_are_one_sentence(engine, sentence):
    with pytest.raises(MemboundError, match=sentence):
        run(scenario(**engine))


def test_static_batching_and_a_technique_that_undoes_it_are_refused():
    document = scenario(batching="static").model_dump(mode="json")
    with pytest.raises(MemboundError, match="'static', but a technique makes it continuous"):
        run(parse_scenario(document | {"techniques": [{"name": "continuous_batching"}]}))
