"""Page Simulate: what do users get from this traffic on this engine, and what would another policy give them?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import serving, text
from membound.app.figures import simulate as figures
from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.app.records import Run
from membound.app.views import asked, fields, states, traffic
from membound.app.views.charts import chart, words_table
from membound.app.views.said import said
from membound.app.views.session import translate
from membound.app.views.simulated_case import conditions, simulated_case
from membound.roofline.errors import MemboundError
from membound.roofline.scenario import parse_scenario

PAGE = "simulate"
KIND = "policies"
METRICS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
GOOD, BAD = "✓", "✕"


def page() -> None:
    """Draw the form, and the run of what it asks as soon as there is one."""
    t = translate()
    st.title(t("simulate.title"), anchor="top")
    st.caption(t("simulate.intro"))
    try:
        question = traffic.question(t)
    except MemboundError as error:
        states.problem(str(error), t("simulate.fix"))
        return
    if question is None:
        return
    scenario, policies = question
    spec = {"scenario": scenario.to_yaml(), "policies": policies}
    untouched = not any(name in traffic.DEFAULTS for name in st.query_params)
    run = asked.answer(KIND, spec, t("simulate.run"), start=untouched)
    document = None if run is None else run.comparison()
    if run is not None and document is not None:
        _result(run, document["cases"], t)


def _result(run: Run, cases: Sequence[Mapping[str, Any]], t: Translate) -> None:
    given = cases[0]
    slo = given["scenario"]["slo"]
    _answer(given, slo, t)
    _most(given, t)
    left, right = st.columns([3, 2], gap="large")
    with left:
        _latencies(cases, slo)
    with right:
        st.header(t("simulate.compare"), anchor="compare")
        words_table(_comparison(cases, slo, t))
        st.caption(t("simulate.compare_caption", baseline=t("simulate.case_given")))
    simulated_case(run, cases)


@st.fragment
def _latencies(cases: Sequence[Mapping[str, Any]], slo: Mapping[str, float | None]) -> None:
    """How a latency is distributed; another one draws no more than this."""
    t, given = translate(), cases[0]
    st.header(t("simulate.latencies"), anchor="latencies")
    metric = fields.one_of(PAGE, "metric", METRICS, METRICS[0], t)
    chart(
        figures.latency_figure(cases, metric, slo.get(metric), t),
        key="latency",
        alt=figures.latency_alt(cases, metric, t),
        caption=t(
            "simulate.latency_caption", error=text.percent(given["relative_error"]), conditions=conditions(given, t)
        ),
        table=_quantile_table(cases, metric, t),
    )


# --- what users get ---


def _answer(case: Mapping[str, Any], slo: Mapping[str, float | None], t: Translate) -> None:
    summary = case["summary"]
    if not summary["completed"]:
        st.header(t("simulate.nobody", requests=f"{summary['requests']:,}"), anchor="answer")
        _lost(case, t)
        return
    st.header(_headline(summary, slo, t), anchor="answer")
    bound, share = max(summary["bottleneck_share"].items(), key=lambda item: item[1])
    sentences = [
        t(
            "simulate.latencies_said",
            ttft=_against(summary["ttft_s"]["p99"], slo["ttft_s"], t),
            tpot=_against(summary["tpot_s"]["p99"], slo["tpot_s"], t),
        ),
        t("simulate.bound_said", bound=bound_words(bound, t), share=text.percent(share)),
    ]
    if slo["e2e_s"] is not None:
        sentences.insert(1, t("simulate.e2e_said", e2e=_against(summary["e2e_s"]["p99"], slo["e2e_s"], t)))
    st.write(" ".join(sentences))
    _lost(case, t)
    shown = [
        ("throughput", text.rate(summary["output_tokens_per_s"])),
        ("kv_used", text.percent(summary["kv_utilization"])),
        ("preempted", f"{summary['preemptions']:,}"),
        ("cost", text.usd(summary["cost_usd_per_million_tokens"])),
    ]
    if given := _given(slo):
        shown.insert(0, ("goodput", f"{text.digits(summary['goodput_rps'])} /s"))
    with st.container(horizontal=True, gap="large"):
        for name, value in shown:
            words = t(f"simulate.{name}_help", kept=_kept(given, t))
            st.metric(t(f"simulate.{name}"), value, help=words, width="content")


def _headline(summary: Mapping[str, Any], slo: Mapping[str, float | None], t: Translate) -> str:
    """Which share of the requests keep the objectives that are given; how many were answered where none is."""
    if given := _given(slo):
        return t("simulate.answer", share=_share(summary["slo_attainment"]), kept=_kept(given, t))
    return t("simulate.no_objective", done=f"{summary['completed']:,}", requests=f"{summary['requests']:,}")


def _given(slo: Mapping[str, float | None]) -> list[str]:
    """The latencies that have an objective."""
    return [name for name in METRICS if slo.get(name) is not None]


def _kept(given: Sequence[str], t: Translate) -> str:
    """`the objective for TTFT`, or `both objectives`."""
    counted = {1: "simulate.the_objective", 2: "simulate.both_objectives"}.get(len(given), "simulate.all_objectives")
    return t(counted, metric=t(f"simulate.metric_{given[0]}") if given else "")


def _against(value: float | None, bound: float | None, t: Translate) -> str:
    """A latency, beside its objective where it has one."""
    if bound is None:
        return text.known_seconds(value)
    return t("simulate.against", value=text.known_seconds(value), bound=text.known_seconds(bound))


def _most(case: Mapping[str, Any], t: Translate) -> None:
    """The largest rate within the objective, for whoever asks; a closed loop has no rate to raise."""
    scenario = case["scenario"]
    if scenario["workload"]["arrivals"]["kind"] == "closed_loop" or not _given(scenario["slo"]):
        return
    with st.expander(t("simulate.most_title")):
        st.caption(t("simulate.most_intro"))
        spec = {"scenario": parse_scenario(scenario).to_yaml()}
        run = asked.answer("max_rate", spec, t("simulate.most_run"))
        found = None if run is None else run.comparison()
        if found is not None:
            summary = found["summary"]
            st.markdown(
                t(
                    "simulate.most_found",
                    rate=text.digits(found["max_rate_rps"]),
                    ttft=text.known_seconds(summary["ttft_s"]["p99"]),
                    tpot=text.known_seconds(summary["tpot_s"]["p99"]),
                    output=text.rate(summary["output_tokens_per_s"]),
                    usd=text.usd(summary["cost_usd_per_million_tokens"]),
                )
            )


def _lost(case: Mapping[str, Any], t: Translate) -> None:
    """How many requests were not answered, and why the first was not."""
    summary = case["summary"]
    if lost := summary["rejected"] + summary["failed"]:
        words = t("simulate.lost_said", lost=f"{lost:,}", requests=f"{summary['requests']:,}")
        reasons = [said(note, t) for note in case["provenance"].get("notes", ()) if "turned away" in note]
        st.warning(text.plain(" ".join([words, *reasons])), icon=":material/block:")


def _comparison(cases: Sequence[Mapping[str, Any]], slo: Mapping[str, float | None], t: Translate) -> pd.DataFrame:
    """A column for each policy, a row for each metric: policies are few and metrics are read across."""
    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        (t("simulate.throughput"), lambda s: text.rate(s["output_tokens_per_s"])),
    ]
    if given := _given(slo):
        rows = [
            (t("simulate.attainment", kept=_kept(given, t)), lambda s: _share(s["slo_attainment"])),
            (t("simulate.goodput"), lambda s: f"{text.digits(s['goodput_rps'])} /s"),
            *rows,
        ]
    for metric in METRICS:
        for percentile in ("p50", "p99"):
            rows.append((f"{t(f'simulate.metric_{metric}')} {percentile}", _judged(metric, percentile, slo)))
    rows += [
        (t("simulate.kv_used"), lambda s: text.percent(s["kv_utilization"])),
        (t("simulate.preempted"), lambda s: f"{s['preemptions']:,}"),
        (t("simulate.lost"), lambda s: f"{s['rejected'] + s['failed']:,}"),
        (t("simulate.cost"), lambda s: text.usd(s["cost_usd_per_million_tokens"])),
    ]
    return pd.DataFrame(
        {t("simulate.c_metric"): [name for name, _ in rows]}
        | {_name(case, t): [shown(case["summary"]) for _, shown in rows] for case in cases}
    )


def _judged(metric: str, percentile: str, slo: Mapping[str, float | None]) -> Callable[[Mapping[str, Any]], str]:
    bound = slo.get(metric)

    def shown(summary: Mapping[str, Any]) -> str:
        value = summary[metric][percentile]
        if value is None or bound is None or percentile != "p99":
            return text.known_seconds(value)
        return f"{GOOD if value <= bound else BAD} {text.known_seconds(value)}"

    return shown


def _quantile_table(cases: Sequence[Mapping[str, Any]], metric: str, t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {t("simulate.share_y"): [round(100 * share, 2) for share in serving.SHARES]}
        | {f"{_name(case, t)}, s": case["quantiles"][metric] for case in cases if metric in case["quantiles"]}
    )


def _name(case: Mapping[str, Any], t: Translate) -> str:
    return t(f"simulate.case_{case['name']}")


def _share(fraction: float) -> str:
    """Shares near 1 keep the digit that an objective is about."""
    return f"{100 * fraction:.1f} %"
