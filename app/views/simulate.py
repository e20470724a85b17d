"""Page Simulate: what do users get from this traffic on this engine, and what would another policy give them?"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from membound.app import serving, text
from membound.app.figures import simulate as figures
from membound.app.figures.template import BOUND_MARKS
from membound.app.i18n import Translate
from membound.app.store import Run
from membound.app.views import asked, fields, states, traffic
from membound.app.views.charts import chart
from membound.app.views.session import store, translate
from membound.roofline.errors import MemboundError
from membound.roofline.parallel import Parallelism
from membound.roofline.results.result import BOUNDS
from membound.roofline.scenario import parse_scenario

PAGE = "simulate"
KIND = "policies"
METRICS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
GOOD, BAD = "✓", "✕"
DRAWN = ("start_s", "time_s", "steps", "tokens", "sequences", "replica", *BOUNDS)


def page() -> None:
    """Draw the form, and the run of what it asks as soon as there is one."""
    t = translate()
    st.title(t("simulate.title"))
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
        st.header(t("simulate.latencies"))
        metric = fields.one_of(PAGE, "metric", METRICS, METRICS[0], t)
        chart(
            figures.latency_figure(cases, metric, slo.get(metric), t),
            key="latency",
            alt=figures.latency_alt(cases, metric, t),
            caption=t(
                "simulate.latency_caption",
                error=text.percent(given["relative_error"]),
                conditions=_conditions(given, t),
            ),
            table=_quantile_table(cases, metric, t),
        )
    with right:
        st.header(t("simulate.compare"))
        st.dataframe(_comparison(cases, slo, t), hide_index=True, key="cases", height="content")
        st.caption(t("simulate.compare_caption", baseline=t("simulate.case_given")))
    names = [case["name"] for case in cases]
    shown = names[0]
    if len(names) > 1:
        shown = fields.one_of(PAGE, "shown", names, names[0], t, lambda name: t(f"simulate.case_{name}"))
    case = cases[names.index(shown)]
    _over_time(case, t)
    if positions := case.get("acceptance_by_position"):
        st.caption(t("simulate.accepted", listed=t("sign.list").join(text.percent(share) for share in positions)))
    _steps(run, case, t)
    if case.get("cluster"):
        _cluster(case["cluster"], t)
    _downloads(run, case, t)
    notes = [*case["provenance"].get("notes", ())]
    st.caption(text.plain(" · ".join(notes)))


# --- what users get ---


def _answer(case: Mapping[str, Any], slo: Mapping[str, float | None], t: Translate) -> None:
    summary = case["summary"]
    if not summary["completed"]:
        st.header(t("simulate.nobody", requests=f"{summary['requests']:,}"))
        _lost(case, t)
        return
    st.header(_headline(summary, slo, t))
    bound, share = max(summary["bottleneck_share"].items(), key=lambda item: item[1])
    said = [
        t(
            "simulate.latencies_said",
            ttft=_against(summary["ttft_s"]["p99"], slo["ttft_s"], t),
            tpot=_against(summary["tpot_s"]["p99"], slo["tpot_s"], t),
        ),
        t("simulate.bound_said", bound=f"{BOUND_MARKS[bound]} {t(f'bound.{bound}')}", share=text.percent(share)),
    ]
    if slo["e2e_s"] is not None:
        said.insert(1, t("simulate.e2e_said", e2e=_against(summary["e2e_s"]["p99"], slo["e2e_s"], t)))
    st.write(" ".join(said))
    _lost(case, t)
    shown = [
        ("throughput", text.rate(summary["output_tokens_per_s"])),
        ("kv_used", text.percent(summary["kv_utilization"])),
        ("preempted", f"{summary['preemptions']:,}"),
        ("cost", _money(summary["cost_usd_per_million_tokens"])),
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
        return _seconds(value)
    return t("simulate.against", value=_seconds(value), bound=_seconds(bound))


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
                    ttft=_seconds(summary["ttft_s"]["p99"]),
                    tpot=_seconds(summary["tpot_s"]["p99"]),
                    output=text.rate(summary["output_tokens_per_s"]),
                    usd=_money(summary["cost_usd_per_million_tokens"]),
                )
            )


def _lost(case: Mapping[str, Any], t: Translate) -> None:
    """How many requests were not answered, and why the first was not."""
    summary = case["summary"]
    if lost := summary["rejected"] + summary["failed"]:
        said = t("simulate.lost_said", lost=f"{lost:,}", requests=f"{summary['requests']:,}")
        reasons = [note for note in case["provenance"].get("notes", ()) if "turned away" in note]
        st.warning(text.plain(" ".join([said, *reasons])), icon=":material/block:")


def _conditions(case: Mapping[str, Any], t: Translate) -> str:
    scenario, summary = case["scenario"], case["summary"]
    pools = scenario["engine"]["disaggregation"]
    said = t("sign.list").join(
        filter(
            None,
            [
                _devices(scenario, case["over_time"]["engines"], t),
                pools and t("simulate.pools", prefill=pools["prefill_engines"], decode=pools["decode_engines"]),
            ],
        )
    )
    return t(
        "simulate.conditions",
        model=scenario["model"],
        device=said,
        requests=f"{summary['requests']:,}",
        duration=text.seconds(summary["duration_s"]),
    )


def _devices(scenario: Mapping[str, Any], engines: int | None, t: Translate) -> str:
    """`8 × H100-SXM5 + 2 × L40S`: the devices of all engines, at most where their number changes."""
    if scenario["cluster"] is None:
        return f"{Parallelism(**scenario['parallel']).devices * (engines or 1)} × {scenario['hardware']}"
    most: dict[str, int] = {}
    scaled = False
    for group in scenario["cluster"]["groups"]:
        name = group["hardware"] or scenario["hardware"]
        replicas = group["autoscaling"]["max_replicas"] if group["autoscaling"] else group["count"]
        degrees = group["parallel"] or scenario["parallel"]
        most[name] = most.get(name, 0) + replicas * Parallelism(**degrees).devices
        scaled |= group["autoscaling"] is not None
    devices = " + ".join(f"{count} × {name}" for name, count in most.items())
    return t("simulate.up_to", devices=devices) if scaled else devices


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
        (t("simulate.cost"), lambda s: _money(s["cost_usd_per_million_tokens"])),
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
            return _seconds(value)
        return f"{GOOD if value <= bound else BAD} {_seconds(value)}"

    return shown


def _quantile_table(cases: Sequence[Mapping[str, Any]], metric: str, t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {t("simulate.share_y"): [round(100 * share, 2) for share in serving.SHARES]}
        | {f"{_name(case, t)}, s": case["quantiles"][metric] for case in cases if metric in case["quantiles"]}
    )


# --- what happened ---


def _over_time(case: Mapping[str, Any], t: Translate) -> None:
    st.header(t("simulate.over_time"))
    over_time = case["over_time"]
    edges = over_time["edges_s"]
    table = pd.DataFrame(
        {
            t("simulate.time_x"): edges[:-1],
            **{t(f"bound.{bound}"): values for bound, values in over_time["bounds"].items()},
            **{t(f"simulate.{name}"): over_time[name] for name in ("running", "waiting")},
            t("simulate.kv_y"): over_time["kv_gib"],
        }
    )
    chart(
        figures.time_figure(over_time, t),
        key="over_time",
        alt=figures.time_alt(over_time, t),
        caption=t(
            "simulate.over_time_caption", conditions=_conditions(case, t), width=text.seconds(edges[1] - edges[0])
        ),
        table=table,
    )


def _steps(run: Run, case: Mapping[str, Any], t: Translate) -> None:
    steps = _step_columns(run.id, case["name"])
    rows = len(steps["start_s"])
    if not rows:
        return
    st.header(t("simulate.steps"))
    first, caption = 0, "simulate.steps_caption"
    if "replica" in steps:
        numbers = [str(number) for number in np.unique(steps["replica"])]
        number = fields.choice(PAGE, "replica", numbers, numbers[0], t)
        of = steps["replica"] == int(number)
        steps = {name: column[of] for name, column in steps.items()}
        rows = len(steps["start_s"])
    elif (case["over_time"]["engines"] or 1) > 1:
        caption = "simulate.steps_caption_pools"
    if rows > figures.MOST_STEPS:
        end_s = float(steps["start_s"][-figures.MOST_STEPS])
        from_s = st.slider(t("simulate.window"), 0.0, max(end_s, 1e-6), 0.0, key="window", format="%.2f s")
        first = int(np.searchsorted(steps["start_s"], from_s))
    window = {name: column[first : first + figures.MOST_STEPS] for name, column in steps.items()}
    chart(
        figures.steps_figure(window, t),
        key="steps",
        alt=t("simulate.steps_alt", rows=len(window["start_s"])),
        caption=t(caption, shown=len(window["start_s"]), rows=f"{rows:,}"),
        table=pd.DataFrame(window),
    )


@st.cache_data(max_entries=8, show_spinner=False)
def _step_columns(run_id: str, name: str) -> dict[str, np.ndarray]:
    table = store().run(run_id).table(f"steps.{name}")
    return {column: table[column].to_numpy() for column in table.column_names if column in DRAWN}


def _cluster(cluster: Mapping[str, Any], t: Translate) -> None:
    st.header(t("simulate.replicas_title"))
    st.dataframe(
        pd.DataFrame(
            {
                t("simulate.c_replica"): one["replica"],
                t("simulate.c_device"): f"{one['devices']} × {one['hardware']}",
                t("simulate.c_requests"): one["requests"],
                t("simulate.c_tokens"): f"{one['output_tokens']:,}",
                t("simulate.c_up"): text.seconds(one["up_s"]),
                t("simulate.c_busy"): text.percent(one["utilization"]),
                t("simulate.kv_used"): text.percent(one["kv_utilization"]),
                t("simulate.c_failures"): one["failures"],
                t("simulate.c_usd"): _money(one["cost_usd"]),
            }
            for one in cluster["replicas"]
        ),
        hide_index=True,
        key="replicas_table",
    )
    said = t("simulate.cluster_said", failures=cluster["failures"], retries=cluster["retries"])
    events = [event for event in cluster["events"] if event["time_s"] > 0][:12]
    if events:
        listed = "; ".join(
            text.seconds(event["time_s"]) + t(f"simulate.event_{event['kind']}", replica=event["replica"])
            for event in events
        )
        said += " " + t("simulate.events_said", listed=listed)
    st.caption(said)


# --- files ---


def _downloads(run: Run, case: Mapping[str, Any], t: Translate) -> None:
    """What was run and what came out of it; large files are made when they are asked for."""
    run_id, name = run.id, case["name"]
    with st.container(horizontal=True):
        scenario = parse_scenario(case["scenario"]).to_yaml()
        st.download_button(t("download.yaml"), scenario, f"{name}.yaml", "application/yaml", on_click="ignore")
        summary = json.dumps({key: case[key] for key in ("summary", "provenance")}, ensure_ascii=False, indent=1)
        st.download_button(t("download.json"), summary, f"{name}.json", "application/json", on_click="ignore")
        st.download_button(
            t("simulate.perfetto"),
            lambda: serving.perfetto(store().run(run_id), case).encode(),
            f"{name}-perfetto.json",
            "application/json",
            on_click="ignore",
            help=t("simulate.perfetto_help"),
        )
        for table in ("requests", "steps"):
            st.download_button(
                t(f"simulate.csv_{table}"),
                partial(_csv, run_id, f"{table}.{name}"),
                f"{name}-{table}.csv",
                "text/csv",
                on_click="ignore",
                key=f"csv_{table}",
            )


def _csv(run_id: str, table: str) -> bytes:
    return bytes(store().run(run_id).table(table).to_pandas().to_csv(index=False).encode())


def _name(case: Mapping[str, Any], t: Translate) -> str:
    return t(f"simulate.case_{case['name']}")


def _share(fraction: float) -> str:
    """Shares near 1 keep the digit that an objective is about."""
    return f"{100 * fraction:.1f} %"


def _seconds(value: float | None) -> str:
    return "–" if value is None else text.seconds(value)


def _money(usd: float | None) -> str:
    return "–" if usd is None else f"${usd:,.2f}"
