"""Do the figures of Simulate, Plan and Validate draw what the engines say, each thing so that it can be told apart?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from membound.app import deployments, judged, serving
from membound.app.figures import plan, simulate, validation
from membound.app.i18n import LANGUAGES, Translate
from membound.app.views import traffic
from membound.roofline.results.result import BOUNDS
from membound.roofline.scenario import parse_scenario
from membound.simulator.run import run

T = Translate("en")


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    scenario = traffic.scenario_of(traffic.DEFAULTS | {"requests": 60, "output": 40})
    asked = serving.variants(scenario, ["static", "prefill_first"])
    return [{"name": name, **serving.case_of(run(one))} for name, one in asked.items()]


@pytest.fixture(scope="module")
def plans() -> list[dict[str, Any]]:
    form = traffic.DEFAULTS | {"spread": "fixed", "output": 32, "requests": 300, "rate": 10.0, "prompt": 256}
    scenario = parse_scenario(traffic.scenario_of(form).model_dump(mode="json"))
    devices = ["H100-SXM5", "A100-SXM4-80GB"]
    found = deployments.plan_each(scenario, devices, ["given"], "cost", False, lambda done, message: None)
    return list(found["devices"])


def _lines(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.mode == "lines" and trace.showlegend is not False]


@pytest.mark.parametrize("metric", serving.LATENCIES)
def test_each_policy_has_a_line_of_its_own_that_rises_to_all(cases: list[dict[str, Any]], metric: str) -> None:
    figure = simulate.latency_figure(cases, metric, 0.5, T)
    lines = _lines(figure)
    assert [line.name for line in lines] == ["as chosen", "static", "prompts first"]
    assert len({line.line.color for line in lines}) == len({line.line.dash for line in lines}) == 3
    for line in lines:
        assert list(line.x) == sorted(line.x) and line.y[-1] == 100
    has_bands = any(trace.fill == "toself" for trace in figure.data)
    assert has_bands == (metric in simulate.OF_STEPS)


def test_the_objective_stands_at_its_value_in_the_axis_unit(cases: list[dict[str, Any]]) -> None:
    figure = simulate.latency_figure(cases, "tpot_s", 0.05, T)
    (line,) = [shape for shape in figure.layout.shapes if shape.x0 == shape.x1]
    assert line.x0 == pytest.approx(50.0) and "ms" in figure.layout.xaxis.title.text
    low, high = figure.layout.xaxis.range
    assert low < math.log10(50.0) < high


def test_time_is_drawn_by_bound_in_patterns_that_differ(cases: list[dict[str, Any]]) -> None:
    figure = simulate.time_figure(cases[0]["over_time"], T)
    stacked = [trace for trace in figure.data if trace.stackgroup]
    assert len({(trace.fillpattern.shape, trace.line.color) for trace in stacked}) == len(stacked) > 1
    assert all(sum(column) <= 1 + 1e-9 for column in zip(*(trace.y for trace in stacked), strict=True))


def test_steps_are_as_wide_as_their_time() -> None:
    result = run(traffic.scenario_of(traffic.DEFAULTS | {"requests": 30}))
    steps = {name: result.steps[name] for name in ("start_s", "time_s", "steps", "tokens", "sequences", *BOUNDS)}
    figure = simulate.steps_figure(steps, T)
    assert sum(float(np.sum(bar.width)) for bar in figure.data) == pytest.approx(float(steps["time_s"].sum()))
    assert sum(len(bar.x) for bar in figure.data) == len(steps["start_s"])


def test_a_click_on_the_front_is_the_point_that_is_drawn(plans: list[dict[str, Any]]) -> None:
    figure = plan.front_figure(plans, {"tpot_s": 0.05, "ttft_s": 1.0}, T)
    points = plan.front_points(plans)
    drawn = 0
    for trace in figure.data:
        for x, y, opacity, number in zip(
            *(trace.x, trace.y, trace.marker.opacity or [], trace.customdata if trace.customdata is not None else []),
            strict=False,
        ):
            point = points[number]
            assert (x, y) == (point["tokens_per_s_per_user"], point["tokens_per_s_per_gpu"])
            assert (opacity == 1.0) == point["meets_slo"]
            drawn += 1
    assert drawn == len(points) > 0
    stars = [trace for trace in figure.data if "star" in str(trace.marker.symbol)]
    assert len(stars) == sum(one["best"] is not None for one in plans)


def test_devices_differ_in_colour_and_symbol(plans: list[dict[str, Any]]) -> None:
    figure = plan.front_figure(plans, {"tpot_s": None, "ttft_s": 1.0}, T)
    fronts = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert len({trace.line.color for trace in fronts}) == len({trace.marker.symbol for trace in fronts}) == 2


def test_a_cross_is_a_measurement_outside_of_its_interval() -> None:
    rows = judged.shipped()
    rows = rows[rows["metric"] == "gain"]
    rows = rows[judged.is_within(rows)].copy()
    rows.iloc[0, rows.columns.get_loc("measured")] = 3.0  # type: ignore[index]
    figure = validation.scatter_figure(rows, "gain", "phase", T)
    crosses = [trace for trace in figure.data if trace.mode == "markers" and trace.marker.symbol == "x-open"]
    assert [x for trace in crosses for x in trace.x] == [3.0]
    hollow = [trace for trace in figure.data if trace.mode == "markers" and trace.marker.symbol != "x-open"]
    assert sum(len(trace.x) for trace in hollow) == len(rows) - 1
    assert len({trace.marker.symbol for trace in hollow}) == len(hollow)


def test_values_are_drawn_in_the_unit_that_the_axis_names() -> None:
    rows = judged.shipped()
    rows = rows[rows["metric"] == "tpot_s"]
    figure = validation.scatter_figure(rows, "tpot_s", "phase", T)
    assert figure.layout.xaxis.title.text == "measured, ms"
    drawn = sorted(x for trace in figure.data if trace.mode == "markers" for x in trace.x)
    assert drawn == pytest.approx(sorted(rows["measured"] * 1e3))
    assert [validation.unit_of(name)[1] for name in ("tpot_ms", "decode_tok_s_per_user", "latency_us", "req_s")] == [
        "ms",
        "tok/s",
        "µs",
        "/s",
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_figure_has_words_for_who_cannot_see_it(
    cases: list[dict[str, Any]], plans: list[dict[str, Any]], language: str
) -> None:
    t = Translate(language)
    said = [
        *(simulate.latency_alt(cases, metric, t) for metric in serving.LATENCIES),
        simulate.time_alt(cases[0]["over_time"], t),
        plan.front_alt(plans, t),
        validation.scatter_alt(judged.shipped(), t),
    ]
    assert all(any(character.isdigit() for character in sentence) for sentence in said)
    best = next(one for one in plans if one["sensitivity"])
    for figure in (
        plan.sensitivity_figure(best["sensitivity"]["elasticity"], t),
        validation.groups_figure(judged.errors_by(judged.shipped(), "phase"), t),
        validation.promises_figure(judged.promises(judged.published()[0]), t),
    ):
        assert figure.layout.xaxis.title.text


# --- prompts and answers together and apart ---


def _way(device: str, apart: bool, gpus: int, at_end: int | None, usd: float = 4.0) -> dict[str, Any]:
    """One of the compared as a plan's document has it."""
    end = at_end and {"device": device, "gpus": at_end, "usd_per_h": usd * at_end}
    best = {
        "device": device, "gpus": gpus, "usd_per_h": usd * gpus, "summary": None, "upper_end": None, "price": None,
        "output_tokens_per_s": 100.0,
    }  # fmt: skip
    return {"device": device, "disaggregated": apart, "best": best, "reason": None, "at_upper_end": end}


BOTH_WAYS = [_way("A", False, 8, 12), _way("A", True, 6, 8), _way("B", False, 4, None), _way("B", True, 10, 10)]


def _plans() -> list[dict[str, Any]]:
    return [
        {"device": name, "best": None, "options": {}, "front": [], "confirmed": [],
         "compared": [one for one in BOTH_WAYS if one["device"] == name]}
        for name in ("A", "B")
    ]  # fmt: skip


def test_both_ways_to_serve_are_bars_that_end_where_times_are_longest() -> None:
    fig = plan.compared_figure(BOTH_WAYS, T)
    solid, pale = fig.data[0::2], fig.data[1::2]
    assert [list(bar.x) for bar in solid] == [[32.0, 16.0], [24.0, 40.0]], "together, apart"
    for bar, end, ways in zip(solid, pale, (BOTH_WAYS[0::2], BOTH_WAYS[1::2]), strict=True):
        ends = [base + more for base, more in zip(end.base, end.x, strict=True)]
        assert list(end.base) == list(bar.x) and all(after >= before for after, before in zip(ends, bar.x, strict=True))
        assert [str(one["best"]["gpus"]) in words for one, words in zip(ways, end.text, strict=True)] == [True, True]
    assert "8–12" in pale[0].text[0] and "–" not in pale[0].text[1]


def test_without_a_price_the_bars_count_devices() -> None:
    unpriced = deployments.at_prices({"objective": "cost", "devices": _plans()}, {"A": 0.0, "B": 1.0})["devices"]
    fig = plan.compared_figure(deployments.both_ways(unpriced), T)
    assert list(fig.data[0].x) == [8.0, 4.0]


def test_the_safest_ranks_first_of_what_holds_where_times_are_longest_at_any_price() -> None:
    document = {"objective": "cost", "devices": _plans()}
    assert (deployments.safest(document["devices"], "cost") or {})["gpus"] == 8
    dear = deployments.at_prices(document, {"A": 9.0, "B": 1.0})["devices"]
    assert deployments.safest(dear, "cost") == {"device": "B", "gpus": 10, "usd_per_h": 10.0}
    none = [{"compared": [_way("A", False, 8, None)]}]
    assert deployments.safest(none, "cost") is None
