"""How does a finished comparison read: predicted against measured, row by row and drawn?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.figures import comparison
from membound.app.views import tables
from membound.app.views.charts import chart
from membound.app.views.session import translate
from membound.roofline.comparison import Comparison


def rows_of(documents: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Comparison rows; a later one replaces an earlier one of the same technique and point."""
    rows: dict[str, Comparison] = {}
    for document in documents:
        row = Comparison.model_validate(document)
        rows[json.dumps([row.technique, row.point], sort_keys=True)] = row
    return list(rows.values())


def comparison_result(rows: Sequence[Comparison], key: str) -> None:
    """The gains drawn and as a table, the baselines' times beside them."""
    t = translate()
    gains = [row for row in rows if row.technique != "baseline"]
    baselines = [row for row in rows if row.technique == "baseline"]
    conditions = rows[0].conditions
    left, right = st.columns([1, 2.4], gap="medium")
    with left:
        st.header(t("results.baseline"))
        chart(
            comparison.baseline_figure(rows, t),
            key=f"{key}_baseline",
            alt=t("comparison.baseline_alt", points=len(baselines)),
            caption=t("comparison.baseline_caption", conditions=conditions),
        )
    with right:
        st.header(t("results.gains"))
        chart(
            comparison.gains_figure(rows, t),
            key=f"{key}_gains",
            alt=comparison.alt_text(rows, t),
            caption=t("comparison.caption", conditions=conditions),
        )
    st.dataframe(tables.baseline_table(baselines, t), hide_index=True, key=f"{key}_baselines")
    st.dataframe(tables.gains_table(gains, t), hide_index=True, key=f"{key}_table")
    st.caption(t("results.legend"))


def run_summary(summary: Mapping[str, Any], key: str) -> None:
    """The summary of a single run: latencies with their percentiles, then rates and shares."""
    t = translate()
    latencies = {name: value for name, value in summary.items() if isinstance(value, dict) and "p50" in value}
    table = pd.DataFrame(
        {
            t("column.metric"): t(f"metric.{name}"),
            **{column: _latency(value[column]) for column in ("mean", "p50", "p90", "p99")},
        }
        for name, value in latencies.items()
    )
    cells = st.columns(4)
    cells[0].metric(t("metric.output_tokens_per_s"), text.rate(summary["output_tokens_per_s"]))
    cells[1].metric(t("metric.requests"), f"{summary['completed']} / {summary['requests']}")
    cells[2].metric(t("metric.duration"), text.seconds(summary["duration_s"]))
    used = summary["kv_utilization"]
    cells[3].metric(t("metric.kv_utilization"), "–" if used is None else text.percent(used))
    st.dataframe(table, hide_index=True, key=f"{key}_latencies")


def outcome(document: Mapping[str, Any], scenario_yaml: str, name: str) -> None:
    """The result of a job or a run: its comparison or its summary, what was noted on the way, and downloads."""
    rows = rows_of(document.get("comparisons", []))
    if rows:
        comparison_result(rows, name)
    elif document.get("summary"):
        run_summary(document["summary"], name)
    st.caption(" · ".join([*document.get("notes", []), *document.get("provenance", {}).get("notes", [])]))
    _downloads(rows, document, scenario_yaml, name)


def _downloads(rows: Sequence[Comparison], document: Mapping[str, Any], scenario_yaml: str, name: str) -> None:
    """The result as CSV and JSON, its scenario as YAML."""
    t = translate()
    with st.container(horizontal=True):
        if rows:
            csv = pd.DataFrame([row.model_dump(mode="json") for row in rows]).to_csv(index=False).encode()
            st.download_button(t("download.csv"), csv, f"{name}.csv", "text/csv", on_click="ignore")
        content = json.dumps(document, ensure_ascii=False, indent=1)
        st.download_button(t("download.json"), content, f"{name}.json", "application/json", on_click="ignore")
        st.download_button(t("download.yaml"), scenario_yaml, f"{name}.yaml", "application/yaml", on_click="ignore")


def _latency(value: float | None) -> str:
    return "–" if value is None else text.seconds(value)
