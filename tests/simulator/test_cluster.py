"""Replicas behind a router: nothing is lost, one replica is the plain engine, and routers keep their laws."""

from __future__ import annotations

import heapq
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.app.reports import run as run_report
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, load_scenario, parse_scenario
from membound.simulator.cluster.autoscaler import Autoscaler
from membound.simulator.planning.planner import plan
from membound.simulator.run import run

COUNTS = ("id", "prompt_tokens", "output_tokens", "preemptions", "service_class", "completed")
TIMES = ("arrival_s", "admitted_s", "first_token_s", "finished_s")
ROUTERS = ("round_robin", "random", "least_loaded", "power_of_two")

ENGINES = st.fixed_dictionaries(
    {
        "batching": st.sampled_from(["static", "continuous", "prefill_first", "chunked_prefill"]),
        "max_num_seqs": st.sampled_from([1, 4, 32]),
        "max_batched_tokens": st.sampled_from([700, 4096]),
        "num_blocks": st.sampled_from([45, 120, 5000]),
    }
)
EXTRAS = st.sampled_from(
    [
        {},
        {"preemption": "swap", "host_kv_gib": 0.1},
        {"reserved_tokens": 300},
        {"prefix_caching": True},
        {"prefix_caching": True, "host_kv_gib": 0.05},
        {"admission": {"max_waiting": 3}},
    ]
)
ARRIVALS = st.sampled_from(
    [
        {"kind": "poisson", "rate_rps": 5.0},
        {"kind": "poisson", "rate_rps": 60.0},
        {"kind": "gamma", "rate_rps": 20.0, "cv": 4.0},
        {"kind": "closed_loop", "concurrency": 9, "think": {"kind": "exponential", "mean_s": 0.2}},
        {"kind": "closed_loop", "concurrency": 7},
    ]
)
SESSIONS = {
    "kind": "sessions",
    "tokens": {"kind": "uniform", "low": 5, "high": 60},
    "turns": {"kind": "geometric", "mean": 3},
    "think": {"kind": "exponential", "mean_s": 1.0},
    "system_tokens": 70,
    "context_limit": 290,
}
PROMPTS = st.sampled_from([{"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 200}}, SESSIONS])
FAILURES = st.sampled_from(
    [
        None,
        {"mtbf_s": 1.0, "mttr_s": 0.3},
        {"mtbf_s": 1.0, "mttr_s": 0.3, "on_failure": "resume"},
        {"mtbf_s": 0.4, "mttr_s": 0.3, "most_retries": 1},
        {"mtbf_s": 2.0, "mttr_s": 0.3, "on_failure": "fail"},
        {"outages": [{"replica": i, "at_s": 0.5 + 0.3 * i} for i in range(3)]},
    ]
)
SCALING = st.sampled_from(
    [
        None,
        {"max_replicas": 4, "target_queue": 3, "interval_s": 0.25, "cold_start_s": 0.4, "scale_in_after_s": 0.5},
        {
            "min_replicas": 0,
            "max_replicas": 5,
            "target_utilization": 0.7,
            "interval_s": 0.2,
            "cold_start_s": 0.1,
            "scale_in_after_s": 0.2,
        },
    ]
)


def scenario(cluster: dict | None = None, engine: dict | None = None, requests: int = 40, **workload) -> Scenario:
    return parse_scenario(
        {
            "name": "cluster",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "engine": {"batching": "chunked_prefill", "max_num_seqs": 32} | (engine or {}),
            "cluster": cluster,
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": 20.0},
                "requests": requests,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 200}},
                "output_tokens": {"kind": "uniform", "low": 1, "high": 90},
                "seed": 5,
            }
            | workload,
        }
    )


def replicas(count: int, router: str = "least_loaded", **changes) -> dict:
    return {"router": router, "groups": [{"count": count}]} | changes


def assert_equal(one: RunResult, other: RunResult) -> None:
    for name in COUNTS:
        np.testing.assert_array_equal(one.requests[name], other.requests[name])
    for name in TIMES:
        np.testing.assert_allclose(one.requests[name], other.requests[name], rtol=1e-9, atol=1e-12)
    for name in ("steps", "drafted", "accepted", "emitted", "moved_blocks", "cached_tokens"):
        assert one.steps[name].sum() == other.steps[name].sum()
    expected = numbers(other)
    for name, value in numbers(one).items():
        if name == "bottleneck_share":  # of the mean step of a row, which can lie beyond a kink
            assert value == pytest.approx(expected[name], abs=2e-3)
        elif isinstance(value, dict):
            assert value == pytest.approx(expected[name], rel=1e-9, nan_ok=True)
        else:
            assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-12, nan_ok=True)


def numbers(result: RunResult) -> dict:
    """The summary, with NaN where nothing was sampled."""

    def number(value):
        if isinstance(value, dict):
            return {name: number(part) for name, part in value.items()}
        return math.nan if value is None else value

    return number(result.summary.model_dump())


def assert_conserved(result: RunResult, requests: int | None) -> None:
    """Every request ended once, and every emitted token is one that somebody has or that a failure cost."""
    summary, table, cluster = result.summary, result.requests, result.cluster
    assert summary.completed + summary.rejected + summary.failed == summary.requests
    if requests is not None:
        assert table["id"].tolist() == list(range(requests))
    assert not np.any(table["completed"] & table["failed"])
    kept = ~table["failed"]
    assert result.steps["emitted"].sum() == table["output_tokens"][kept].sum() + cluster.lost_output_tokens
    assert sum(replica.requests for replica in cluster.replicas) == np.sum(table["replica"] >= 0)
    assert table["retries"].sum() == cluster.retries
    assert sum(summary.bottleneck_share.values()) == pytest.approx(1)
    for replica in cluster.replicas:
        assert 0 <= replica.busy_s <= replica.up_s * (1 + 1e-9)
        in_steps_s = result.steps["time_s"][result.steps["replica"] == replica.replica].sum()
        assert in_steps_s <= replica.busy_s + 1e-9


@settings(deadline=None, max_examples=20)
@given(engine=ENGINES, extra=EXTRAS, arrivals=ARRIVALS, prompts=PROMPTS, seed=st.integers(0, 2**32), data=st.data())
def test_one_replica_behind_any_router_is_the_plain_engine(engine, extra, arrivals, prompts, seed, data):
    router = data.draw(st.sampled_from((*ROUTERS, *(["prefix_aware"] if extra.get("prefix_caching") else []))))
    given_ = {"engine": engine | extra, "arrivals": arrivals, "prompts": prompts, "seed": seed}
    assert_equal(run(scenario(replicas(1, router), **given_)), run(scenario(**given_)))


@settings(deadline=None, max_examples=25)
@given(
    engine=ENGINES,
    extra=EXTRAS,
    arrivals=ARRIVALS,
    prompts=PROMPTS,
    failures=FAILURES,
    scaling=SCALING,
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_no_request_is_lost_and_equal_steps_as_one_change_nothing(
    engine, extra, arrivals, prompts, failures, scaling, seed, data
):
    router = data.draw(st.sampled_from((*ROUTERS, *(["prefix_aware"] * 4 if extra.get("prefix_caching") else []))))
    groups = [{"count": 2, "autoscaling": scaling}, {"count": 1, "hardware": "L40S", "profile": "vllm"}]
    cluster = {"router": router, "groups": groups, "failures": failures}
    chosen = scenario(cluster, engine | extra, arrivals=arrivals, prompts=prompts, seed=seed)
    together, apart = run(chosen), run(chosen, step_by_step=True)
    assert_equal(together, apart)
    for name in ("replica", "retries", "failed"):
        np.testing.assert_array_equal(together.requests[name], apart.requests[name])
    assert together.cluster.lost_tokens == apart.cluster.lost_tokens
    # A turn that is refused, or fails, ends its conversation.
    everybody_asked = prompts is not SESSIONS or together.summary.completed == together.summary.requests
    assert_conserved(together, 40 if everybody_asked else None)


# -- closed forms: engines that serve one request at a time, in one step


def one_at_a_time(count: int, router: str, load: float, requests: int = 6000, seed: int = 1) -> tuple[RunResult, float]:
    """Requests of one step each at `load` a replica, and the seconds of a step."""
    prompts = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 1000}}
    alike = {"prompts": prompts, "output_tokens": {"kind": "fixed", "tokens": 1}, "seed": seed}
    step_s = run(scenario(None, requests=1, **alike)).summary.e2e_s.mean
    arrivals = {"kind": "poisson", "rate_rps": count * load / step_s}
    return run(scenario(replicas(count, router), {"max_num_seqs": 1}, requests, arrivals=arrivals, **alike)), step_s


def waits(result: RunResult) -> np.ndarray:
    return result.requests["admitted_s"] - result.requests["arrival_s"]


def test_random_routing_makes_each_replica_an_m_d_1_queue():
    """Poisson arrivals that are divided at random stay Poisson; the mean wait is rho s / (2 (1 - rho))
    (Pollaczek and Khinchine)."""
    load = 0.6
    means = []
    for seed in range(2):
        result, step_s = one_at_a_time(3, "random", load, 8000, seed)
        means.append(waits(result).mean() / step_s)
    assert np.mean(means) == pytest.approx(load / (2 * (1 - load)), rel=0.05)


@pytest.mark.parametrize("count", [2, 5])
def test_equal_requests_one_after_the_other_to_each_are_one_queue_before_all_replicas(count):
    """Equal services end in the order in which they began, so round robin is first come, first served before `count`
    servers (M/D/c), which this test runs by itself."""
    result, step_s = one_at_a_time(count, "round_robin", 0.85, 3000)
    free_s = [0.0] * count
    expected = []
    for arrival_s in result.requests["arrival_s"].tolist():
        begun_s = max(arrival_s, heapq.heappop(free_s))
        heapq.heappush(free_s, begun_s + step_s)
        expected.append(begun_s - arrival_s)
    np.testing.assert_allclose(waits(result), expected, atol=1e-6 * step_s)


def test_round_robin_of_equal_requests_waits_as_erlang_c_says():
    """M/D/c by Cosmetatos (1976): half of the M/M/c wait, times 1 + (1 - rho)(c - 1)(sqrt(4 + 5c) - 2) / (16 rho c)."""
    c, rho = 4, 0.8
    offered = c * rho
    tail = offered**c / math.factorial(c) / (1 - rho)
    queued = tail / (sum(offered**k / math.factorial(k) for k in range(c)) + tail)
    m_m_c = queued / (c * (1 - rho))
    expected = m_m_c / 2 * (1 + (1 - rho) * (c - 1) * (math.sqrt(4 + 5 * c) - 2) / (16 * rho * c))
    means = []
    for seed in range(2):
        result, step_s = one_at_a_time(c, "round_robin", rho, 10_000, seed)
        means.append(waits(result).mean() / step_s)
    assert np.mean(means) == pytest.approx(expected, rel=0.06)


def test_two_choices_beat_chance_at_the_tail_and_come_near_to_knowing_all_loads():
    """Mitzenmacher (2001): the tail of two choices falls doubly exponentially, that of one geometrically."""
    late = {
        router: float(np.percentile(waits(one_at_a_time(8, router, 0.9, 6000)[0]), 99))
        for router in ("random", "power_of_two", "least_loaded")
    }
    assert late["least_loaded"] <= late["power_of_two"] < 0.5 * late["random"]
    gained = (late["random"] - late["power_of_two"]) / (late["random"] - late["least_loaded"])
    assert gained > 0.7


# -- routers


def test_round_robin_gives_everybody_as_many():
    counts = [replica.requests for replica in run(scenario(replicas(3, "round_robin"), requests=100)).cluster.replicas]
    assert sorted(counts) == [33, 33, 34]


@pytest.mark.parametrize("load_bound", [1.0, 1.5])
def test_conversations_find_most_where_their_last_turn_was(load_bound):
    prompts = SESSIONS | {"turns": {"kind": "fixed", "count": 6}, "context_limit": 2000}
    hits = {}
    for router in (*ROUTERS, "prefix_aware"):
        bound = {"load_bound": load_bound} if router == "prefix_aware" else {}
        chosen = scenario(replicas(4, router, **bound), {"prefix_caching": True}, 300, prompts=prompts)
        hits[router] = run(chosen).summary.prefix_hit_rate
    assert all(hits["prefix_aware"] > other for router, other in hits.items() if router != "prefix_aware")


def test_a_load_bound_keeps_one_shared_prompt_from_filling_one_replica():
    prompts = SESSIONS | {"system_tokens": 2000, "context_limit": 4000, "turns": {"kind": "fixed", "count": 1}}
    alike = {"prompts": prompts, "arrivals": {"kind": "constant", "rate_rps": 10}}
    alike["output_tokens"] = {"kind": "fixed", "tokens": 300}
    shares = []
    for bound in (1.0, 1000.0):
        chosen = scenario(
            replicas(4, "prefix_aware", load_bound=bound),
            {"prefix_caching": True},
            200,
            **alike,
        )
        shares.append(max(replica.requests for replica in run(chosen).cluster.replicas) / 200)
    assert shares[0] < 0.4 and shares[1] == 1


def test_twice_the_replicas_at_twice_the_load_are_no_worse():
    busy = {"max_num_seqs": 8}
    one = run(scenario(replicas(1), busy, 1000, arrivals={"kind": "poisson", "rate_rps": 20.0}))
    two = run(scenario(replicas(2), busy, 2000, arrivals={"kind": "poisson", "rate_rps": 40.0}))
    for name in ("ttft_s", "e2e_s"):
        assert getattr(two.summary, name).mean <= getattr(one.summary, name).mean
        assert getattr(two.summary, name).p99 <= getattr(one.summary, name).p99


def test_a_faster_device_takes_more_requests_and_its_parallelism_is_its_own():
    groups = [{"hardware": "L40S"}, {}, {"parallel": {"tp": 2}}]
    chosen = scenario(
        {"router": "least_loaded", "groups": groups}, requests=800, arrivals={"kind": "poisson", "rate_rps": 90.0}
    )
    slow, fast, double = run(chosen).cluster.replicas
    assert slow.requests < fast.requests < double.requests
    assert (slow.devices, fast.devices, double.devices) == (1, 1, 2)
    assert double.device_hours == pytest.approx(2 * fast.device_hours)


def test_a_request_goes_where_it_fits():
    """Blocks beside the weights of a small device hold less than this prompt; the large device's hold it."""
    prompts = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 60_000}}
    groups = [{"hardware": "L4"}, {}]
    result = run(scenario({"router": "round_robin", "groups": groups}, requests=6, prompts=prompts))
    assert result.summary.completed == 6 and set(result.requests["replica"]) == {1}


# -- replicas that come and go


@pytest.mark.parametrize("target", [{"target_queue": 1.0}, {"target_utilization": 0.5}])
def test_autoscaling_between_equal_bounds_is_a_fixed_number(target):
    scaling = {"min_replicas": 3, "max_replicas": 3, "cold_start_s": 0.0, "interval_s": 0.1, "scale_in_after_s": 0.0}
    fixed = run(scenario(replicas(3), requests=200))
    scaled = run(scenario(replicas(3, groups=[{"count": 3, "autoscaling": scaling | target}]), requests=200))
    assert_equal(fixed, scaled)
    assert fixed.cluster == scaled.cluster


def test_a_later_start_is_never_better():
    arrivals = {"kind": "poisson", "rate_rps": 60.0}
    late = []
    for cold_start_s in (0.0, 5.0, 1e6):
        scaling = {"max_replicas": 6, "target_queue": 8, "cold_start_s": cold_start_s, "interval_s": 1.0}
        groups = [{"count": 1, "autoscaling": scaling}]
        late.append(run(scenario(replicas(1, groups=groups), {"max_num_seqs": 8}, 600, arrivals=arrivals)))
    means = [result.summary.ttft_s.mean for result in late]
    assert means[0] < means[1] < means[2]
    alone = run(scenario(None, {"max_num_seqs": 8}, 600, arrivals=arrivals))
    assert means[2] == pytest.approx(alone.summary.ttft_s.mean, rel=1e-9)


def test_what_is_paid_for_is_from_the_start_to_the_release_at_the_catalog_s_price():
    scaling = {
        "max_replicas": 3,
        "target_queue": 4,
        "cold_start_s": 1.0,
        "interval_s": 0.5,
        "scale_in_after_s": 1.0,
    }
    result = run(scenario(replicas(1, groups=[{"count": 1, "autoscaling": scaling}]), requests=300))
    cluster = result.cluster
    for replica in cluster.replicas:
        times = {event.kind: event.time_s for event in cluster.events if event.replica == replica.replica}
        paid_s = times.get("release", result.summary.duration_s) - times["start"]
        assert replica.device_hours * 3600 == pytest.approx(paid_s)
        assert replica.up_s <= paid_s
    price = get_hardware("H100-SXM5").price
    assert cluster.cost_usd == pytest.approx(cluster.device_hours * price.usd_per_h)
    assert {replica.price_date for replica in cluster.replicas} == {str(price.date)}
    tokens = result.requests["output_tokens"].sum()
    assert result.summary.cost_usd_per_million_tokens == pytest.approx(cluster.cost_usd / tokens * 1e6)
    assert cluster.most_replicas == 3 and {event.kind for event in cluster.events} >= {
        "start",
        "up",
        "drain",
        "release",
    }


def test_an_empty_group_starts_when_somebody_asks():
    scaling = {"min_replicas": 0, "max_replicas": 2, "target_queue": 8, "cold_start_s": 2.0, "interval_s": 1.0}
    result = run(scenario(replicas(0, groups=[{"count": 0, "autoscaling": scaling}])))
    assert result.summary.completed == 40
    assert result.requests["admitted_s"].min() == pytest.approx(3.0)


def test_the_autoscaler_wants_what_meets_its_target_and_forgets_peaks_in_time():
    scaler = Autoscaler(
        parse_scenario(
            scenario().model_dump(mode="json")
            | {"cluster": {"groups": [{"autoscaling": {"max_replicas": 9, "target_queue": 4, "scale_in_after_s": 20}}]}}
        )
        .cluster.groups[0]
        .autoscaling
    )
    assert scaler.wanted(10.0, 21, 0, 0.0) == (6, 9)
    assert scaler.wanted(20.0, 5, 0, 0.0) == (2, 6)
    assert scaler.wanted(30.0, 4, 0, 0.0) == (1, 6)
    assert scaler.wanted(40.0, 100, 0, 0.0) == (9, 9)


# -- replicas that fail


def outage(**changes) -> dict:
    return {"outages": [{"replica": 0, "at_s": 1.0} | changes]}


@pytest.mark.parametrize("on_failure", ["retry", "resume", "fail"])
def test_what_a_failure_costs(on_failure):
    chosen = scenario(replicas(2, failures=outage() | {"on_failure": on_failure}), requests=100)
    calm, struck = run(scenario(replicas(2), requests=100)), run(chosen)
    assert_conserved(struck, 100)
    cluster, lost = struck.cluster, struck.requests["retries"] > 0
    assert cluster.failures == 1 and cluster.replicas[0].up_s == pytest.approx(1.0)
    assert not np.any(struck.requests["finished_s"][struck.requests["replica"] == 0] > 1.0)
    assert cluster.lost_tokens > 0
    if on_failure == "fail":
        assert struck.summary.failed > 0 and cluster.retries == 0
        return
    assert struck.summary.completed == 100 and lost.any()
    later = struck.requests["finished_s"] >= calm.requests["finished_s"] - 1e-9
    assert later[lost].all()
    # Who asks again sees a first token after the failure; who goes on has seen it before.
    first_s = struck.requests["first_token_s"][lost]
    assert (on_failure == "retry") == bool(np.all(first_s > 1.0))
    assert (cluster.lost_output_tokens > 0) == (on_failure == "retry")


def test_requests_wait_for_the_only_replica_to_return_and_fail_where_it_never_does():
    back = run(scenario(replicas(1, failures=outage(for_s=10.0))))
    assert back.summary.completed == 40
    assert np.all((back.requests["finished_s"] <= 1.0) | (back.requests["first_token_s"] > 11.0))
    gone = run(scenario(replicas(1, failures=outage())))
    assert gone.summary.failed == np.sum(np.isnan(gone.requests["finished_s"])) > 0
    assert gone.summary.completed == np.sum(gone.requests["finished_s"] <= 1.0) > 0
    assert np.all(gone.requests["replica"][gone.requests["arrival_s"] > 1.0] == -1)


def test_available_time_is_mtbf_over_mtbf_and_mttr():
    failures = {"mtbf_s": 2.0, "mttr_s": 1.0, "on_failure": "resume", "most_retries": 1000}
    chosen = scenario(replicas(8, failures=failures), requests=2000)
    result = run(chosen)
    assert_conserved(result, 2000)
    up_s = sum(replica.up_s for replica in result.cluster.replicas)
    assert up_s / (8 * result.summary.duration_s) == pytest.approx(2 / 3, rel=0.07)


@pytest.mark.parametrize("on_failure", ["retry", "resume"])
def test_a_failure_changes_no_token_of_an_answer(on_failure):
    """The text was recorded; n-gram drafts are looked for in what a sequence really has."""
    document = load_scenario("live-cpu").model_dump(mode="json") | {"hardware": "H100-SXM5", "sweep": []}
    document["techniques"] = [{"name": "continuous_batching"}, {"name": "ngram_speculation"}]
    outages = [{"replica": 0, "at_s": 0.1, "for_s": 0.1}, {"replica": 1, "at_s": 0.3}]
    failures = {"outages": outages, "on_failure": on_failure}
    struck = run(parse_scenario(document | {"cluster": replicas(2, failures=failures)}))
    assert struck.cluster.retries > 0 and struck.summary.completed == 32
    assert struck.outputs == run(parse_scenario(document)).outputs


# -- around it


def test_a_plan_chooses_the_replicas_itself():
    with pytest.raises(MemboundError, match="field 'cluster' names replicas, and a plan chooses them"):
        plan(scenario(replicas(2)))


def test_the_document_has_a_cluster_and_reads_in_a_terminal(capsys):
    from rich.console import Console

    document = json.loads(
        json.dumps(run(load_scenario("cluster-failover").with_value("workload.requests", 800)).to_json())
    )
    assert set(document) == {"scenario", "summary", "provenance", "cluster"}
    assert document["cluster"]["failures"] == 1
    Console(width=160).print(run_report.run(document))
    said = capsys.readouterr().out
    assert "prefix aware router" in said and "failures: 1, requests sent again" in said
    assert "cluster" not in run(scenario()).to_json()


@pytest.mark.parametrize(
    ("cluster", "engine", "sentence"),
    [
        ({"groups": []}, {}, r"cluster\.groups"),
        ({"router": "fastest", "groups": [{}]}, {}, r"field 'cluster\.router' is 'fastest'"),
        (replicas(2, "prefix_aware"), {}, r"router is 'prefix_aware', but engine\.prefix_caching is false"),
        (replicas(2, load_bound=2), {}, r"load_bound is 2, but router is 'least_loaded'"),
        (replicas(2), {"disaggregation": {}}, r"cluster and engine\.disaggregation exclude each other"),
        (replicas(0), {}, r"count is 0 and there is no autoscaling"),
        (replicas(2, failures={}), {}, r"give either outages or mtbf_s with mttr_s"),
        (replicas(2, failures={"mtbf_s": 5}), {}, r"mtbf_s and mttr_s belong together"),
        (replicas(2, failures={"outages": [{"replica": 2, "at_s": 1}]}), {}, r"the run begins with 0 to 1"),
        (
            replicas(2, failures={"outages": [{"replica": 0, "at_s": 1, "for_s": 9}, {"replica": 0, "at_s": 5}]}),
            {},
            r"replica 0 fail at 5 s, when it is down",
        ),
        (
            replicas(2, failures=outage() | {"on_failure": "fail", "most_retries": 2}),
            {},
            r"most_retries is 2, but on_failure is 'fail'",
        ),
        ({"groups": [{"autoscaling": {"max_replicas": 2}}]}, {}, r"give one of target_queue and target_utilization"),
        (
            {"groups": [{"count": 3, "autoscaling": {"max_replicas": 2, "target_queue": 1}}]},
            {},
            r"count is 3, but autoscaling allows 1 to 2",
        ),
        ({"groups": [{"profile": "vlm"}]}, {}, r"engine profile 'vlm' is unknown"),
        ({"groups": [{"hardware": "H1000"}]}, {}, r"hardware 'H1000' is unknown"),
        ({"groups": [{}, {"hardware": "T4"}]}, {}, r"does not fit: its weights take .* may take of .* 'T4'"),
    ],
)
def test_bad_input_is_one_sentence(cluster, engine, sentence):
    with pytest.raises(MemboundError, match=sentence):
        run(scenario(cluster, engine))
