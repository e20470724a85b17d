"""How does a finished comparison read: predicted against measured, row by row and drawn?"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import run_files, text
from membound.app.figures import captions, comparison
from membound.app.home import StoreError
from membound.app.i18n import Translate
from membound.app.records import Run
from membound.app.views import tables
from membound.app.views.charts import chart
from membound.app.views.said import said
from membound.app.views.served_result import served_result
from membound.app.views.session import language, store, translate
from membound.roofline.results.comparison import Comparison

# The grid measures the cells of its first rows alone, and cut the longer verdicts of others.
VERDICT_WIDTH = 130


def rows_of(documents: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Comparison rows; a later one replaces an earlier one of the same technique and point."""
    rows: dict[str, Comparison] = {}
    for document in documents:
        row = Comparison.model_validate(document)
        rows[json.dumps([row.technique, row.point], sort_keys=True)] = row
    return list(rows.values())


def comparison_result(rows: Sequence[Comparison], scenario_yaml: str, key: str) -> None:
    """The gains drawn and as a table, the baselines' times beside them."""
    t = translate()
    gains = [row for row in rows if row.technique != "baseline"]
    baselines = [row for row in rows if row.technique == "baseline"]
    conditions = t("sign.semicolon").join(dict.fromkeys(said(row.conditions, t) for row in rows))
    _answer(rows, t)
    left, right = st.columns([1, 2.4], gap="medium")
    with left:
        st.subheader(t("results.baseline"), anchor="results-baseline")
        chart(
            comparison.baseline_figure(rows, t),
            key=f"{key}_baseline",
            alt=t("comparison.baseline_alt", points=len(baselines)),
            caption=captions.of_baseline(scenario_yaml, conditions, t),
            table=tables.baseline_table(baselines, t),
        )
    if gains:
        with right:
            st.subheader(t("results.gains"), anchor="results-gains")
            chart(
                comparison.gains_figure(rows, t),
                key=f"{key}_gains",
                alt=comparison.alt_text(rows, t),
                caption=captions.of_gains(scenario_yaml, gains, conditions, t),
                table=tables.gains_table(gains, t),
            )
    st.dataframe(tables.baseline_table(baselines, t), hide_index=True, key=f"{key}_baselines")
    if gains:
        verdict = {t("column.verdict"): st.column_config.Column(width=VERDICT_WIDTH)}
        st.dataframe(tables.gains_table(gains, t), hide_index=True, key=f"{key}_table", column_config=verdict)
    st.caption(t("results.legend"))


def _answer(rows: Sequence[Comparison], t: Translate) -> None:
    """How far the predictions were right, once there is something to hold them against."""
    gains = [row for row in rows if row.technique != "baseline" and row.measured is not None]
    errors = [abs(row.error) for row in rows if row.error is not None]
    if not gains or not errors:
        return
    within = sum(row.low <= (row.measured or 0.0) <= row.high for row in gains)
    st.header(
        t("results.answer", gains=len(gains), within=within, error=text.percent(statistics.median(errors))),
        anchor="answer",
    )


def run_summary(summary: Mapping[str, Any], key: str) -> None:
    """The summary of a single run: latencies with their percentiles, then rates and shares."""
    t = translate()
    cells = st.columns(4)
    cells[0].metric(t("metric.output_tokens_per_s"), text.rate(summary["output_tokens_per_s"]))
    cells[1].metric(t("metric.requests"), f"{summary['completed']} / {summary['requests']}")
    cells[2].metric(t("metric.duration"), text.seconds(summary["duration_s"]))
    used = summary["kv_utilization"]
    cells[3].metric(t("metric.kv_utilization"), "–" if used is None else text.percent(used))
    st.dataframe(tables.summary_table(summary, t), hide_index=True, key=f"{key}_latencies")


def outcome(document: Mapping[str, Any], scenario_yaml: str, name: str) -> None:
    """The result of a job or a run: its comparison or its summary, who made it, what was noted, and downloads."""
    rows = rows_of(document.get("comparisons", []))
    kept = _kept(document.get("run_id", name))
    if document.get("metrics"):
        served_result(document["metrics"], rows[0].conditions, name, translate())
    elif rows:
        comparison_result(rows, scenario_yaml, name)
    elif document.get("summary"):
        run_summary(document["summary"], name)
    made = [] if kept is None else [made_by(kept)]
    notes = [*document.get("notes", []), *document.get("provenance", {}).get("notes", [])]
    told = [*made, *(said(note, translate()) for note in notes)]
    if told:
        with st.expander(translate()("results.how")):
            st.markdown("\n".join(f"- {text.plain(line)}" for line in told))
    _downloads(rows, document, scenario_yaml, name, kept)


def made_by(run: Run) -> str:
    """Who made a run's numbers, in the session's language; the run never changes, so its tables are read once."""
    return _made_by(run, language())


@st.cache_data(max_entries=500, show_spinner=False, hash_funcs={Run: lambda run: run.id})
def _made_by(run: Run, language: str) -> str:
    return run_files.producer_of(run, Translate(language))


def _kept(run_id: str) -> Run | None:
    try:
        return store().run(run_id)
    except StoreError:  # it was deleted since
        return None


def _downloads(
    rows: Sequence[Comparison], document: Mapping[str, Any], scenario_yaml: str, name: str, kept: Run | None
) -> None:
    """The result as a page, CSV and JSON, its scenario, its timeline; large files are made when asked for."""
    t, spoken = translate(), language()
    with st.container(horizontal=True):
        st.download_button(
            t("download.html"),
            lambda: run_files.run_page(document, scenario_yaml, name, spoken, t).encode(),
            f"{name}.html",
            "text/html",
            on_click="ignore",
            help=t("download.html_help"),
        )
        if rows:
            csv = pd.DataFrame([row.model_dump(mode="json") for row in rows]).to_csv(index=False).encode()
            st.download_button(t("download.csv"), csv, f"{name}.csv", "text/csv", on_click="ignore")
        content = json.dumps(document, ensure_ascii=False, indent=1)
        st.download_button(t("download.json"), content, f"{name}.json", "application/json", on_click="ignore")
        st.download_button(t("download.yaml"), scenario_yaml, f"{name}.yaml", "application/yaml", on_click="ignore")
        if kept is not None and run_files.has_steps(kept):
            ending = "zip" if kept.kind == "compare" else "json"
            st.download_button(
                t("simulate.perfetto"),
                lambda: run_files.perfetto(kept),
                f"{name}-perfetto.{ending}",
                f"application/{ending}",
                on_click="ignore",
                help=t("simulate.perfetto_help"),
            )
