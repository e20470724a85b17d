"""Page Simulate: what happened in one simulated case, over time, step by step and replica by replica?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from membound.app import serving, text
from membound.app.figures import simulate as figures
from membound.app.i18n import Translate
from membound.app.records import Run
from membound.app.views import fields
from membound.app.views.charts import chart
from membound.app.views.said import said
from membound.app.views.session import store, translate
from membound.roofline.parallel import Parallelism
from membound.roofline.results.result import BOUNDS
from membound.roofline.scenario import parse_scenario

PAGE = "simulate"
DRAWN = ("start_s", "time_s", "steps", "tokens", "sequences", "replica", *BOUNDS)


@st.fragment
def simulated_case(run: Run, cases: Sequence[Mapping[str, Any]]) -> None:
    """The case that is chosen, from its timeline to its files; another one draws no more than this."""
    t = translate()
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
    notes = [said(note, t) for note in case["provenance"].get("notes", ())]
    st.caption(text.plain(" · ".join(notes)))


def _over_time(case: Mapping[str, Any], t: Translate) -> None:
    st.header(t("simulate.over_time"), anchor="over-time")
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
            "simulate.over_time_caption", conditions=conditions(case, t), width=text.seconds(edges[1] - edges[0])
        ),
        table=table,
    )


def _steps(run: Run, case: Mapping[str, Any], t: Translate) -> None:
    steps = _step_columns(run.id, case["name"])
    rows = len(steps["start_s"])
    if not rows:
        return
    st.header(t("simulate.steps"), anchor="steps")
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
    st.header(t("simulate.replicas_title"), anchor="replicas")
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
                t("simulate.c_usd"): text.usd(one["cost_usd"]),
            }
            for one in cluster["replicas"]
        ),
        hide_index=True,
        key="replicas_table",
    )
    told = t("simulate.cluster_said", failures=cluster["failures"], retries=cluster["retries"])
    events = [event for event in cluster["events"] if event["time_s"] > 0][:12]
    if events:
        listed = t("sign.semicolon").join(
            text.seconds(event["time_s"]) + t(f"simulate.event_{event['kind']}", replica=event["replica"])
            for event in events
        )
        told += " " + t("simulate.events_said", listed=listed)
    st.caption(told)


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


# --- where it holds ---


def conditions(case: Mapping[str, Any], t: Translate) -> str:
    """Model, devices, requests and duration of a run, for captions."""
    scenario, summary = case["scenario"], case["summary"]
    pools = scenario["engine"]["disaggregation"]
    devices = t("sign.list").join(
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
        device=devices,
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
