"""How does a finished comparison read: predicted against measured, row by row and drawn?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.figures import comparison
from membound.app.figures.template import BOUND_MARKS
from membound.app.i18n import Translate
from membound.app.views.charts import chart
from membound.app.views.session import translate
from membound.roofline.comparison import Comparison

VERDICT_MARKS = {"gain": "▲", "loss": "▼", "no difference": "＝", "not measured": "…"}


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
        st.subheader(t("results.baseline"))
        chart(
            comparison.baseline_figure(rows, t),
            key=f"{key}_baseline",
            alt=t("comparison.baseline_alt", points=len(baselines)),
            caption=t("comparison.baseline_caption", conditions=conditions),
        )
    with right:
        st.subheader(t("results.gains"))
        chart(
            comparison.gains_figure(rows, t),
            key=f"{key}_gains",
            alt=comparison.alt_text(rows, t),
            caption=t("comparison.caption", conditions=conditions),
        )
    st.dataframe(baseline_table(baselines, t), hide_index=True, key=f"{key}_baselines")
    st.dataframe(gains_table(gains, t), hide_index=True, key=f"{key}_table")
    st.caption(t("results.legend"))


def baseline_table(rows: Sequence[Comparison], t: Translate) -> pd.DataFrame:
    """Time per output token of the plain engine at each point."""
    return pd.DataFrame(
        {
            t("column.point"): comparison.point_label(row.point, t),
            t("column.tpot_predicted"): text.milliseconds(row.predicted),
            t("column.interval"): f"{text.milliseconds(row.low)} – {text.milliseconds(row.high)}",
            t("column.tpot_measured"): _measured(row, text.milliseconds),
            t("column.error"): _error(row),
            t("column.bound"): _bound(row.bottleneck_before, t),
        }
        for row in rows
    )


def gains_table(rows: Sequence[Comparison], t: Translate) -> pd.DataFrame:
    """Each technique at each point with all that a gain needs to be one."""
    return pd.DataFrame(
        {
            t("column.point"): comparison.point_label(row.point, t),
            t("column.technique"): comparison.technique_title(row.technique, t),
            t("column.baseline"): f"{row.baseline}, {t(f'short.{row.metric}')}",
            t("column.predicted"): f"{text.gain(row.predicted)} ({row.low:.2f}–{row.high:.2f})",
            t("column.measured"): _measured(row, text.gain),
            t("column.error"): _error(row),
            t("column.verdict"): f"{VERDICT_MARKS[row.verdict]} {t(f'verdict.{row.verdict}')}",
            t("column.bottleneck"): f"{_bound(row.bottleneck_before, t)} → {_bound(row.bottleneck_after, t)}",
            t("column.quality"): _quality(row, t),
        }
        for row in rows
    )


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
    cells[3].metric(t("metric.kv_utilization"), text.percent(summary["kv_utilization"]))
    st.dataframe(table, hide_index=True, key=f"{key}_latencies")


def downloads(rows: Sequence[Comparison], document: Mapping[str, Any], scenario_yaml: str, name: str) -> None:
    """The result as CSV and JSON, its scenario as YAML."""
    t = translate()
    with st.container(horizontal=True):
        if rows:
            csv = pd.DataFrame([row.model_dump(mode="json") for row in rows]).to_csv(index=False).encode()
            st.download_button(t("download.csv"), csv, f"{name}.csv", "text/csv", on_click="ignore")
        content = json.dumps(document, ensure_ascii=False, indent=1)
        st.download_button(t("download.json"), content, f"{name}.json", "application/json", on_click="ignore")
        st.download_button(t("download.yaml"), scenario_yaml, f"{name}.yaml", "application/yaml", on_click="ignore")


def _measured(row: Comparison, format_value: Any) -> str:
    if row.measured is None:
        return "–"
    spread = "" if row.spread is None else f" ± {format_value(row.spread).rstrip('×')}"
    return f"{format_value(row.measured)}{spread}"


def _error(row: Comparison) -> str:
    return "–" if row.error is None else text.signed_percent(row.error)


def _latency(value: float | None) -> str:
    return "–" if value is None else text.seconds(value)


def _bound(bound: str, t: Translate) -> str:
    return f"{BOUND_MARKS[bound]} {t(f'bound.{bound}')}"


def _quality(row: Comparison, t: Translate) -> str:
    if row.lossless:
        return t("quality.lossless")
    if row.quality is None:
        return t("quality.unknown")
    return t(
        "quality.price",
        kl=text.digits(row.quality.kl_nats, 2),
        agreement=f"{row.quality.top1_agreement:.1%}",
        tokens=row.quality.tokens,
    )
