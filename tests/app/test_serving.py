"""Do the documents behind Simulate, Plan and Validate say what the engines say, and nothing else?"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from membound.app import deployments, judged, serving, uploads
from membound.app.store import Store
from membound.app.tasks import run_plan, run_policies, run_validate
from membound.app.views import opening, traffic
from membound.app.worker import JobContext
from membound.roofline.errors import MemboundError
from membound.roofline.results.result import BOUNDS
from membound.roofline.scenario import Scenario, load_scenario, parse_scenario
from membound.roofline.validation.report import validate_table
from membound.roofline.validation.tables import OPERATOR_COLUMNS
from membound.simulator.run import run
from membound.simulator.timeline import PhaseLog, Timeline


def _scenario(**changes: Any) -> Scenario:
    form = traffic.DEFAULTS | {"requests": 60, "rate": 6.0, "output": 40, "versus": []} | changes
    return traffic.scenario_of(form)


def _answered(store: Store, kind: str, task: Any, **spec: Any) -> Any:
    """The run that a task keeps, as its worker would have it kept."""
    spec["digest"] = "a question"
    job_id = store.submit_job(kind, spec)
    return store.run(task(spec, JobContext(store, job_id))["run_id"])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- the runs of Simulate ---


@pytest.mark.parametrize(
    "changes",
    [{}, {"replicas": 3, "fail_at": 3.0, "fail_for": 4.0}, {"pre": 1, "dec": 2}, {"traffic": "sessions"}],
    ids=["one engine", "replicas, one fails", "prompts apart", "conversations"],
)
def test_what_is_drawn_over_time_adds_up_to_the_run(changes: dict[str, Any]) -> None:
    result = run(_scenario(**changes))
    drawn = serving.over_time(result, bins=37)
    widths = np.diff(drawn["edges_s"])
    assert drawn["edges_s"][-1] == pytest.approx(result.summary.duration_s)
    for bound in BOUNDS:
        if bound != "idle":
            spent = float(np.sum(result.steps["time_s"] * result.steps[bound]))
            assert float(np.dot(drawn["bounds"][bound], widths)) == pytest.approx(spent, rel=1e-6, abs=1e-9)
    done = result.requests["completed"]
    for name, since, until in (("waiting", "arrival_s", "admitted_s"), ("running", "admitted_s", "finished_s")):
        seconds = float(np.sum((result.requests[until] - result.requests[since])[done]))
        assert float(np.dot(drawn[name], widths)) == pytest.approx(seconds, rel=1e-6, abs=1e-9)


def test_memory_over_time_is_the_utilization_of_the_summary() -> None:
    result = run(_scenario())
    drawn = serving.over_time(result)
    held = float(np.dot(drawn["kv_gib"], np.diff(drawn["edges_s"]))) / float(result.steps["time_s"].sum())
    assert held / drawn["kv_capacity_gib"] == pytest.approx(result.summary.kv_utilization, rel=1e-6)
    assert max(drawn["kv_gib"]) <= drawn["kv_capacity_gib"]


def test_distributions_rise_and_have_the_summarys_percentiles() -> None:
    result = run(_scenario())
    case = serving.case_of(result)
    for name in serving.LATENCIES:
        quantiles = case["quantiles"][name]
        assert quantiles == sorted(quantiles)
        for percentile in (50, 90, 99):
            value = quantiles[serving.SHARES.index(percentile / 100)]
            assert value == pytest.approx(case["summary"][name][f"p{percentile}"], rel=1e-9)


def test_policies_are_compared_on_the_same_requests(store: Store) -> None:
    scenario = _scenario()
    kept = _answered(store, "policies", run_policies, scenario=scenario.to_yaml(), policies=["static", "fcfs"])
    cases = (kept.comparison() or {})["cases"]
    assert [case["name"] for case in cases] == ["given", "static"]  # the scenario's own order is no other policy
    tables = [kept.table(f"requests.{name}").to_pandas() for name in ("given", "static")]
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert np.array_equal(tables[0].sort_values("id")[column], tables[1].sort_values("id")[column])
    given, kept_summary = (
        pd.json_normalize(summary).dropna(axis=1)
        for summary in (run(scenario).to_json()["summary"], cases[0]["summary"])
    )
    pd.testing.assert_frame_equal(given, kept_summary, rtol=1e-9)
    assert cases[1]["summary"]["ttft_s"]["p99"] > cases[0]["summary"]["ttft_s"]["p99"]


def test_a_kept_run_gives_the_timeline_that_the_command_writes(store: Store) -> None:
    scenario = _scenario(replicas=2, fail_at=3.0)
    kept = _answered(store, "policies", run_policies, scenario=scenario.to_yaml(), policies=[])
    log = PhaseLog()
    result = run(scenario, observer=log)
    document = kept.comparison() or {}
    assert json.loads(serving.perfetto(kept, document["cases"][0])) == json.loads(Timeline.of(result, log).to_chrome())


def test_preemptions_are_in_the_timeline_of_a_kept_run(store: Store) -> None:
    scenario = _scenario(rate=100.0, output=200).with_value("engine.num_blocks", 700)
    kept = _answered(store, "policies", run_policies, scenario=scenario.to_yaml(), policies=[])
    case = (kept.comparison() or {})["cases"][0]
    assert case["summary"]["preemptions"] > 0
    assert '"preempted"' in serving.perfetto(kept, case)


def test_a_router_is_refused_where_there_is_nothing_to_choose() -> None:
    with pytest.raises(MemboundError, match="give more replicas"):
        serving.variants(_scenario(), ["round_robin"])
    with pytest.raises(MemboundError, match="'fastest' is unknown"):
        serving.variants(_scenario(), ["fastest"])
    routed = serving.variants(_scenario(replicas=2), ["round_robin", "prefix_aware"])
    assert [one.cluster.router for one in routed.values() if one.cluster] == [
        "least_loaded",
        "round_robin",
        "prefix_aware",
    ]


# --- the deployments of Plan ---


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    scenario = parse_scenario(
        {
            "name": "plan",
            "model": "Llama-3.1-70B",
            "hardware": "H100-SXM5",
            "engine": {"max_num_seqs": 256, "max_batched_tokens": 8192},
            "techniques": ["continuous_batching"],
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": 8},
                "requests": 600,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 512}},
                "output_tokens": {"kind": "fixed", "tokens": 64},
            },
            "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
        }
    )
    devices = ["H100-SXM5", "A100-SXM4-80GB", "RTX-3080-10GB"]
    return deployments.plan_each(scenario, devices, ["given"], "cost", True, lambda done, message: None)


def test_each_device_has_an_answer_or_a_reason_and_the_best_is_the_cheapest(planned: dict[str, Any]) -> None:
    assert [plan["device"] for plan in planned["devices"]] == ["H100-SXM5", "A100-SXM4-80GB", "RTX-3080-10GB"]
    assert all((plan["best"] is None) != (plan["reason"] is None) for plan in planned["devices"])
    assert "hold the model" in planned["devices"][2]["reason"]  # 141 GB of weights
    answers = [plan["best"] for plan in planned["devices"] if plan["best"]]
    cheapest = min(answers, key=lambda one: deployments.rank(one, "cost"))
    assert planned["best"] == cheapest["device"] and all(one["usd_per_h"] >= cheapest["usd_per_h"] for one in answers)


def test_other_prices_change_which_device_is_best_and_no_deployment(planned: dict[str, Any]) -> None:
    listed = {plan["device"]: plan["best"]["usd_per_h"] / plan["best"]["gpus"] for plan in planned["devices"][:2]}
    same = deployments.at_prices(planned, listed)
    for before, after in zip(planned["devices"][:2], same["devices"][:2], strict=True):
        assert after["best"]["deployment"] == before["best"]["deployment"]
        for name in ("usd_per_h", "cost_usd_per_million_tokens", "gpus"):
            assert after["best"][name] == pytest.approx(before["best"][name])
        costs = [[point["cost_usd_per_million_tokens"] for point in plan["front"]] for plan in (before, after)]
        assert costs[1] == pytest.approx(costs[0])
    for cheap, dear in (("H100-SXM5", "A100-SXM4-80GB"), ("A100-SXM4-80GB", "H100-SXM5")):
        assert deployments.at_prices(planned, {cheap: 0.01, dear: 100.0})["best"] == cheap
        assert deployments.at_prices(planned, {cheap: 50.0, dear: 0.0})["best"] == cheap, "unknown prices rank last"


def test_a_question_that_nobody_can_answer_is_refused_as_such(planned: dict[str, Any]) -> None:
    scenario = parse_scenario(planned["devices"][0]["best"]["scenario"]).with_value("slo", {})
    with pytest.raises(MemboundError, match="field 'slo' is empty"):
        deployments.plan_each(scenario, ["H100-SXM5"], ["given"], "cost", True, lambda done, message: None)


def test_a_deployment_becomes_the_form_that_makes_its_scenario(planned: dict[str, Any]) -> None:
    for plan in planned["devices"]:
        for found in filter(None, plan.get("options", {}).values()):
            form = traffic.DEFAULTS | opening.settings_of(found, plan["demand"])
            assert set(form) == set(traffic.DEFAULTS), "a field that the form has not"
            made, meant = traffic.scenario_of(form), parse_scenario(found["scenario"])
            assert made.parallel == meant.parallel and made.slo == meant.slo and made.hardware == meant.hardware
            for field in ("max_num_seqs", "max_batched_tokens", "batching", "disaggregation", "profile"):
                assert getattr(made.engine, field) == getattr(meant.engine, field)
            assert made.setup.precision == meant.setup.precision
            replicas = found["deployment"]["replicas"]
            assert made.workload.arrivals.rate_rps == pytest.approx(replicas * meant.workload.arrivals.rate_rps)  # type: ignore[union-attr]
            assert sum(group.count for group in made.cluster.groups) == replicas if made.cluster else replicas == 1


def test_a_plan_is_kept_under_the_question(store: Store, planned: dict[str, Any]) -> None:
    scenario = planned["devices"][0]["best"]["scenario"]
    spec = {"scenario": parse_scenario(scenario).to_yaml(), "devices": ["H100-SXM5"], "precisions": ["given"]}
    kept = _answered(store, "plan", run_plan, **spec, objective="devices", disaggregate=False)
    assert store.runs(kind="plan", digest="a question")[0].id == kept.id
    best = (kept.comparison() or {})["devices"][0]["best"]
    assert best["deployment"]["disaggregation"] is None


# --- the errors of Validate ---


def _table(path: Path, latencies: list[float]) -> Path:
    row = dict.fromkeys(OPERATOR_COLUMNS, "") | {"source": "a test", "gpu": "H100-SXM5", "op": "gemm", "dtype": "bf16"}
    sizes = [1, 8, 64, 512, 4096]
    rows = [
        row | {"m": str(sizes[at % len(sizes)]), "n": "8192", "k": "4096", "latency_us": str(latency)}
        for at, latency in enumerate(latencies)
    ]
    path.write_text("\n".join([",".join(OPERATOR_COLUMNS), *(",".join(one.values()) for one in rows)]))
    return path


def test_errors_by_group_are_those_of_the_command(store: Store, tmp_path: Path) -> None:
    path = _table(tmp_path / "table.csv", [25.0, 27.0, 40.0, 90.0, 700.0, 31.0, 26.0, 44.0, 200.0, 450.0])
    kept = _answered(store, "validate", run_validate, table=uploads.keep(store, path.read_bytes()))
    rows = judged.of_table(kept)
    report = validate_table(path)
    assert len(rows) == len(report.judged) > 0
    for group in report.groups:
        if group.by == {} or list(group.by) == ["phase"]:
            name = group.by.get("phase", "")
            errors = judged.errors_by(rows, "phase" if name else None)
            found = errors[errors["group"] == name].iloc[0]
            assert found["rows"] == group.n
            assert found["median"] == pytest.approx(group.median_ape) and found["p90"] == pytest.approx(group.p90_ape)
            assert found["bias"] == pytest.approx(group.bias) and found["within"] == pytest.approx(
                group.within_interval
            )
    furthest = judged.worst(rows).iloc[0]
    assert furthest["predicted"] / furthest["measured"] - 1 == pytest.approx(report.worst[0].error)


def test_every_comparison_of_this_machine_is_a_row(store: Store) -> None:
    rows, unread = judged.of_runs(store.runs("compare"))
    assert rows.empty and unread == 0
    shipped = judged.shipped()
    assert len(shipped) == 11 and set(shipped["phase"]) >= {"baseline", "int8_weights", "ngram_speculation"}
    # the errors that README prints of this record: the baseline at one user is the furthest off
    worst = judged.worst(shipped).iloc[0]
    assert (worst["phase"], worst["batch"]) == ("baseline", "1")
    assert judged.errors_by(shipped).iloc[0]["p90"] < 0.093


def test_runs_of_this_machine_are_judged_and_those_of_another_version_counted(store: Store) -> None:
    text = (resources.files("membound.data") / "measurements" / f"{judged.SHIPPED}.json").read_text("utf-8")
    yaml = load_scenario("live-cpu").to_yaml()
    for comparison in (json.loads(text), {"comparisons": [{"technique": "of another version"}]}):
        store.save_run(kind="compare", label="a run", digest="d", scenario_yaml=yaml, summary={}, comparison=comparison)
    rows, unread = judged.of_runs(store.runs("compare"))
    assert unread == 1 and len(rows) == len(judged.shipped())
    assert set(rows["model"]) == {load_scenario("live-cpu").model}
    assert judged.errors_by(rows).equals(judged.errors_by(judged.shipped()))


def test_what_is_published_is_read_as_it_is_printed() -> None:
    tables = judged.published()
    promises = judged.promises(tables[0])
    decode = promises[promises["what"].str.startswith("decode attention")].iloc[0]
    row = tables[0].table[tables[0].table["what"].str.startswith("decode attention")].iloc[0]
    assert row["reached"].startswith(f"{decode['reached'] * 100:.1f} %")
    assert all("**" not in cell for found in tables for cell in found.table.astype(str).to_numpy().ravel())
    assert "ratios, sign right" in tables[0].missed
    assert judged.counts(tables[0]) == tuple(tables[0].table.iloc[-2]["rows"].split(" and "))


def test_errors_of_nothing_are_no_rows() -> None:
    assert judged.errors_by(pd.DataFrame(columns=list(judged.COLUMNS))).empty


# --- uploads ---


def test_an_upload_is_found_by_its_digest_alone(store: Store) -> None:
    digest = uploads.keep(store, b"a,b\n")
    assert uploads.keep(store, b"a,b\n") == digest and uploads.find(store, digest).read_bytes() == b"a,b\n"
    for wrong in ("../index.sqlite", "0" * 16, "", digest.upper() + "/", f"{digest}.draft"):
        with pytest.raises(MemboundError, match="upload it again"):
            uploads.find(store, wrong)


def test_an_upload_that_is_too_large_is_refused(store: Store) -> None:
    with pytest.raises(MemboundError, match="at most 20 MiB"):
        uploads.keep(store, bytes(uploads.MOST_MB * 2**20 + 1))
    assert not (store.home / "uploads").exists()
