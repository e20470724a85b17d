"""What can be downloaded of a kept run: who made it, a page that opens without a server, a timeline?"""

from __future__ import annotations

import html
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from membound.app.records import Run
from membound.roofline.results.comparison import Comparison
from membound.roofline.results.metrics import summarize
from membound.roofline.results.result import Provenance, RunResult
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Scenario, scenario_of_text
from membound.simulator.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from membound.app.i18n import Translate

# What tells the runs of a comparison apart in its tables.
CELL = ("point", "technique", "producer", "repeat")


def producer_of(run: Run, t: Translate) -> str:
    """Who made a run's numbers: this machine, the simulator, a server by its address, or the tool that was imported."""
    server = ((run.comparison() or {}).get("provenance") or {}).get("endpoint") or {}
    if "tool" in server:
        return t("producer.imported", tool=server["tool"])
    if "url" in server:
        return t("producer.server", url=server["url"])
    return ", ".join(t(f"producer.{name}") for name in sorted(run.measurers())) or t("producer.simulator")


# --- when what happened ---


def has_steps(run: Run) -> bool:
    """Whether anybody saw the run's steps; those of a server are not seen."""
    return "steps" in run.table_names() and run.table("steps", ["start_s"]).num_rows > 0


def perfetto(run: Run) -> bytes:
    """The run's timeline as Perfetto and Chrome's viewer read it; of a comparison a ZIP of one for each of its runs."""
    found = dict(_timelines(run))
    if run.kind != "compare":
        return found[run.label].to_chrome().encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, timeline in found.items():
            archive.writestr(f"{name}.json", timeline.to_chrome())
    return packed.getvalue()


def _timelines(run: Run) -> Iterator[tuple[str, Timeline]]:
    scenario = scenario_of_text(run.scenario_yaml(), f"scenario of run {run.id}")
    tables = {name: run.table(name).to_pandas() for name in ("requests", "steps")}
    keys = [key for key in CELL if key in tables["steps"].columns]
    cells = tables["steps"][keys].drop_duplicates().to_dict("records") if keys else [{}]
    for cell in cells:
        name = "-".join(str(cell[key]) for key in keys).replace(" ", "_").replace("/", "_") or run.label
        requests, steps = (_columns(table, cell) for table in tables.values())
        yield name, Timeline.of(_result(scenario.model_copy(update={"name": name}), requests, steps))


def _columns(table: pd.DataFrame, cell: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a cell; a column that only other producers fill is left out."""
    for key, value in cell.items():
        table = table[table[key] == value]
    rows = table.drop(columns=list(cell)).dropna(axis="columns", how="all")
    return {str(name): rows[name].infer_objects().to_numpy() for name in rows.columns}


def _result(scenario: Scenario, requests: dict[str, Any], steps: dict[str, Any]) -> RunResult:
    ends_s = [*(steps["start_s"] + steps["time_s"]), *requests["finished_s"][requests["completed"].astype(bool)]]
    duration_s = float(np.max(ends_s))
    summary = summarize(
        requests | {"completed": requests["completed"].astype(bool)},
        steps,
        Samples(),
        slo=scenario.slo,
        duration_s=duration_s,
        idle_s=max(0.0, duration_s - float(steps["time_s"].sum())),
        num_blocks=1,
    )
    provenance = Provenance(producer="runtime", created="", hardware=scenario.hardware)
    return RunResult(scenario, summary, provenance, requests, steps, Samples())


# --- one page ---


def run_page(document: Mapping[str, Any], scenario_yaml: str, name: str, language: str, t: Translate) -> str:
    """The run as one HTML page with its figures, tables, conditions and scenario; it asks nothing of any server."""
    from membound.app.figures import captions, comparison, served
    from membound.app.views import tables
    from membound.app.views.served_result import served_table

    rows = [Comparison.model_validate(row) for row in document.get("comparisons", [])]
    parts: list[str] = []
    if rows:
        baselines = [row for row in rows if row.technique == "baseline"]
        gains = [row for row in rows if row.technique != "baseline"]
        metrics, conditions = document.get("metrics"), "; ".join(dict.fromkeys(row.conditions for row in rows))
        if metrics:
            caption = t("served.caption", conditions=conditions)
            shown = [(t("served.title"), served.served_figure(metrics, t), served_table(metrics, t), caption)]
        else:
            caption = captions.of_baseline(scenario_yaml, conditions, t)
            figure, table = comparison.baseline_figure(rows, t), tables.baseline_table(baselines, t)
            shown = [(t("results.baseline"), figure, table, caption)]
        if gains:
            caption = captions.of_gains(scenario_yaml, gains, conditions, t)
            shown.append((t("results.gains"), comparison.gains_figure(rows, t), tables.gains_table(gains, t), caption))
        parts += _drawn(shown)
    elif document.get("summary"):
        parts.append(_table(tables.summary_table(document["summary"], t)))
    provenance = document.get("provenance", {})
    told = {key: value for key, value in provenance.items() if key != "notes" and value}
    if told:
        parts.append(f"<pre>{html.escape(json.dumps(told, ensure_ascii=False, indent=1))}</pre>")
    parts += [f"<p>{html.escape(note)}</p>" for note in [*document.get("notes", []), *provenance.get("notes", [])]]
    heading = html.escape(t("results.scenario"))
    parts.append(f"<h2>{heading}</h2><pre>{html.escape(scenario_yaml)}</pre>")
    return html_page(t("results.page_title", name=name), parts, language)


def _drawn(figures: Sequence[tuple[str, go.Figure, pd.DataFrame, str]]) -> Iterator[str]:
    for index, (title, figure, table, caption) in enumerate(figures):
        # the first brings the script that draws all of them
        drawn = figure.to_html(full_html=False, include_plotlyjs=index == 0, config={"displaylogo": False})
        yield f"<h2>{html.escape(title)}</h2>{drawn}<p>{html.escape(caption)}</p>{_table(table)}"


def _table(table: pd.DataFrame) -> str:
    return f"<div class='wide'>{table.to_html(index=False, border=0)}</div>"


def html_page(title: str, parts: Sequence[str], language: str) -> str:
    """A page of these parts, which asks nothing of any server; the parts are HTML, the title is text."""
    style = (
        "body{font-family:sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#0f1317;background:#fff}"
        ".wide{overflow-x:auto}td,th{padding:.2rem .8rem .2rem 0;text-align:left}pre{overflow-x:auto}"
    )
    return (
        f"<!doctype html><html lang='{language}'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{style}</style></head><body><h1>{html.escape(title)}</h1>{''.join(parts)}</body></html>"
    )
