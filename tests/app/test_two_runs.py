"""Can any two kept runs be compared, does the history show all of them, and is it read without their results?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from pages import open_page, words_of

from membound.app import jobs, two_runs
from membound.app import store as stores
from membound.app.figures.two_runs import ratio_figure
from membound.app.i18n import Translate
from membound.app.store import Store
from membound.app.two_runs import BASELINE, Key, Pair, Value
from membound.app.views import history

T = Translate("en")
YAML = """name: {name}
model: SmolLM2-135M
hardware: {hardware}
techniques:
- {{name: weight_quantization, format: {format}}}
workload:
  arrivals: {{kind: closed_loop, concurrency: {users}}}
  requests: {requests}
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setattr(jobs, "submit", lambda store, kind, spec, owner="": store.submit_job(kind, spec, owner))
    return Store(tmp_path)


def _yaml(**changed: Any) -> str:
    return YAML.format(**{"name": "m", "hardware": "local", "format": "int4", "users": 4, "requests": 24} | changed)


def _summary(tpot_s: float) -> dict[str, Any]:
    spread = {"mean": tpot_s, "p50": tpot_s, "p90": tpot_s, "p99": tpot_s * 2}
    return {
        "requests": 2, "completed": 2, "rejected": 0, "failed": 0, "duration_s": 1.0, "output_tokens_per_s": 4 / tpot_s,
        "total_tokens_per_s": 5 / tpot_s, "requests_per_s": 1.0, "ttft_s": spread, "tpot_s": spread, "itl_s": spread,
        "e2e_s": spread, "goodput_rps": 1.0, "slo_attainment": 1.0, "kv_utilization": 0.5, "kv_waste": None,
        "prefix_hit_rate": None, "preemptions": 0, "tokens_per_step": 1.0, "acceptance_rate": None,
        "bottleneck_share": {}, "energy_j_per_token": None, "cost_usd_per_million_tokens": None,
    }  # fmt: skip


def _measured(store: Store, tpot_s: float, threads: int = 2, job_id: str | None = None, **changed: Any) -> str:
    provenance = {
        "producer": "runtime", "created": "2026-11-30", "hardware": "local", "versions": {"torch": "2"}, "stalls": 0,
        "emulated": False, "notes": [f"kernels cpp (C++ kernels, 512-bit vectors), {threads} threads"],
    }  # fmt: skip
    summary = _summary(tpot_s)
    return store.save_run(
        kind="measure", label=changed.get("name", "m"), digest="d", scenario_yaml=_yaml(**changed), summary=summary,
        comparison={"summary": summary, "provenance": provenance}, job_id=job_id,
        conditions={"commit": f"c{threads}", "membound": "1"},
    )  # fmt: skip


def _compared(store: Store, tpot_s: float, gain: float, points: tuple[int, ...] = (1, 4)) -> str:
    def row(technique: str, users: int, measured: float) -> dict[str, Any]:
        plain = technique == "baseline"
        return {
            "technique": technique, "baseline": "baseline", "metric": "tpot_s", "unit": "s" if plain else "ratio",
            "point": {"workload.arrivals.concurrency": users, "workload.requests": 8 * users}, "predicted": measured,
            "low": measured, "high": measured, "measured": measured, "spread": measured / 10, "error": 0.0,
            "verdict": "gain", "lossless": True, "quality": None, "bottleneck_before": "memory_weights",
            "bottleneck_after": "memory_weights", "samples": [], "conditions": "a machine, 2 threads",
        }  # fmt: skip

    rows = [
        one for users in points for one in (row("baseline", users, tpot_s), row("weight_quantization", users, gain))
    ]
    return store.save_run(
        kind="compare", label="c", digest="c", scenario_yaml=_yaml(name="c"), summary={"rows": len(rows)},
        comparison={"comparisons": rows, "notes": []},
    )  # fmt: skip


def test_two_measurements_are_compared_number_by_number(store: Store) -> None:
    a, b = store.run(_measured(store, 0.02)), store.run(_measured(store, 0.01, threads=4, format="int8", requests=48))
    found = {(pair.key.metric, pair.key.statistic): pair for pair in two_runs.pairs(a, b)}
    assert found["tpot_s", "mean"].ratio == pytest.approx(0.5) and found["tpot_s", "mean"].verdict == "better"
    assert (
        found["output_tokens_per_s", None].ratio == pytest.approx(2)
        and found["output_tokens_per_s", None].verdict == "better"
    )
    assert found["kv_utilization", None].verdict == "other"
    assert ("acceptance_rate", None) not in found, "neither has one"
    fields = {field: values for field, *values in two_runs.scenario_differences(a, b)}
    assert fields == {"techniques[weight_quantization].format": ["int4", "int8"], "workload.requests": ["24", "48"]}
    told = {name: values for name, *values in two_runs.differences(*map(two_runs.conditions_of, (a, b)))}
    assert told == {"commit": ["c2", "c4"], "threads": ["2", "4"]}


def test_a_measurement_is_found_in_a_sweep_that_has_its_point(store: Store) -> None:
    sweep, alone = store.run(_compared(store, 0.02, 1.8)), store.run(_measured(store, 0.02, users=4))
    shared = [pair for pair in two_runs.pairs(sweep, alone) if pair.ratio is not None]
    assert [(pair.key.metric, pair.key.statistic, pair.verdict) for pair in shared] == [("tpot_s", "mean", "same")]
    other = store.run(_measured(store, 0.02, users=32))
    assert all(pair.ratio is None for pair in two_runs.pairs(sweep, other))


numbers = some.floats(1e-6, 1e6)


@given(a=numbers, b=numbers, spread_a=some.floats(0, 0.5), spread_b=some.floats(0, 0.5), unit=some.sampled_from("s r"))
def test_who_is_better_does_not_depend_on_who_is_called_a(
    a: float, b: float, spread_a: float, spread_b: float, unit: str
) -> None:
    key = Key("tpot_s", "mean", "baseline", ())
    one, other = Value(a, unit, a * spread_a, True), Value(b, unit, b * spread_b, True)
    there, back = Pair(key, one, other), Pair(key, other, one)
    assert there.ratio is not None and back.ratio is not None
    assert there.ratio * back.ratio == pytest.approx(1)
    if spread_a == spread_b == 0:
        opposite = {"better": "worse", "worse": "better", "same": "same"}
        assert back.verdict == opposite[there.verdict]


leaves = some.none() | some.booleans() | some.integers() | some.text(max_size=5)
documents = some.recursive(
    leaves,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text("abc", min_size=1), inner, max_size=3),
)


@given(some.dictionaries(some.text("abc", min_size=1), documents, max_size=3))
def test_a_document_does_not_differ_from_itself(document: dict[str, Any]) -> None:
    copied = json.loads(json.dumps(document))
    assert two_runs.document_differences(document, copied) == []


@given(some.dictionaries(some.text("abc", min_size=1), documents, max_size=3), documents)
def test_a_part_that_only_one_has_is_one_difference(document: dict[str, Any], part: Any) -> None:
    more = document | {"new": part}
    expected = [] if part is None else ["new"]
    assert [path for path, _, _ in two_runs.document_differences(document, more)] == expected


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_link_is_the_comparison(store: Store, language: str) -> None:
    a, b = _measured(store, 0.02), _measured(store, 0.01, threads=4, format="int8")
    at = open_page("live", a=a, b=b, lang=language)
    t = Translate(language)
    assert not at.exception and not at.error
    numbers, (scenario, conditions) = at.dataframe[0].value, (table.value for table in at.table)
    assert numbers.iloc[0]["B"] == "10.0 ms" and numbers.iloc[0][t("two.ratio")] == "0.5×"
    assert list(scenario["A"]) == ["int4"] and list(scenario["B"]) == ["int8"]
    assert t("two.c_commit") in list(conditions[t("two.field")])


def test_choosing_two_runs_writes_the_link(store: Store) -> None:
    a, b = _measured(store, 0.02), _compared(store, 0.02, 1.8)
    at = open_page("live")
    assert T("two.choose") in words_of(at)
    at.selectbox(key="a").set_value(a).run()
    at.selectbox(key="b").set_value(a).run()
    assert T("two.same_run") in words_of(at)
    at.selectbox(key="b").set_value(b).run()
    assert not at.exception and at.dataframe and at.table
    assert [str(at.query_params[key]).strip("[]'") for key in ("a", "b")] == [a, b]


def test_what_cannot_be_compared_is_said(store: Store) -> None:
    assert T("history.empty") in words_of(open_page("live"))
    one = _measured(store, 0.02, users=32)
    assert T("two.empty") in words_of(open_page("live"))
    other = _compared(store, 0.02, 1.8)
    at = open_page("live", a=one, b=other)
    assert T("two.nothing_shared") in words_of(at) and not at.exception
    assert T("two.missing", run="20200101-000000-abcdef") in words_of(
        open_page("live", a="20200101-000000-abcdef", b=one)
    )
    (store.run(other).folder / "scenario.yaml").unlink()
    assert T("two.unreadable") in words_of(open_page("live", a=one, b=other))


def test_measured_runs_stay_in_the_history_whatever_else_was_asked(store: Store) -> None:
    kept = _measured(store, 0.02)
    for _ in range(120):
        job = store.submit_job("plan", {"digest": "x"})
        store.finish_job(job, "done", result={"run_id": "x"})
    assert any(button.key == f"open_{kept}" for button in open_page("live").button)


def test_the_history_reads_no_results_and_shows_more_when_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        job = store.submit_job("measure", {"scenario": _yaml()})
        store.start_job(job)
        store.finish_job(job, "done", result={"run_id": _measured(store, 0.02, job_id=job), "n": number})
    failed = store.submit_job("measure", {"scenario": _yaml(name="broken")})
    store.finish_job(failed, "failed", error="a sentence")

    read = stores._job
    monkeypatch.setattr(stores, "_job", lambda row: pytest.fail("a result was read") if row["result"] else read(row))
    at = open_page("live")
    opened = [button for button in at.button if str(button.key).startswith("open_")]
    assert len(opened) == history.SHOWN and opened[0].key == f"open_{failed}"
    at.button(key="more").click().run()
    assert sum(str(button.key).startswith("open_") for button in at.button) == 2 * history.SHOWN
    assert str(at.query_params["lines"]).strip("[]'") == str(2 * history.SHOWN)
    at.button(key="more").click().run()
    assert sum(str(button.key).startswith("open_") for button in at.button) == 31
    assert not any(button.key == "more" for button in at.button)
    assert sum(str(b.key).startswith("open_") for b in open_page("live", lines="20").button) == 20
    assert not open_page("live", lines="-3").exception


@given(some.lists(some.floats(0.001, 1000.0), min_size=1, max_size=6), some.floats(0.0, 2.0))
def test_the_chart_of_two_runs_holds_every_mark_and_bar_on_a_logarithmic_axis(
    ratios: list[float], spread: float
) -> None:
    pairs = [
        Pair(Key("tpot_s", None, BASELINE, ()), Value(1.0, "s", spread, True), Value(ratio, "s", None, True))
        for ratio in ratios
    ]
    figure = ratio_figure(pairs, Translate("en"))
    low, high = (10**end for end in figure.layout.xaxis.range)
    assert figure.layout.xaxis.type == "log" and low < 1.0 < high
    assert all(low < pair.ratio and pair.ratio + pair.spread < high for pair in pairs)
