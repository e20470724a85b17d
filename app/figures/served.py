"""Does a server do what is predicted of it? Each metric that a client sees, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from membound.app import text
from membound.app.figures.comparison import metric_title, point_label
from membound.app.figures.template import MEASURED, PREDICTED, TEMPLATE, translucent
from membound.app.i18n import Translate

Row = Mapping[str, Any]
SIDE = 0.12  # predicted stands left of measured


def named(row: Row, t: Translate) -> str:
    """The metric of a row, with the statistic of its distribution."""
    return metric_title(row["metric"], row["statistic"], t)


def value(row: Row, number: float) -> str:
    """A number of the row's unit."""
    return text.seconds(number) if row["unit"] == "s" else text.rate(number)


def served_figure(rows: Sequence[Row], t: Translate) -> go.Figure:
    """One panel a metric, a pair a point: hollow with a dotted bar is predicted, solid with a bar is measured."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(named(row, t), []).append(row)
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns)
    fig = make_subplots(
        rows=lines,
        cols=columns,
        subplot_titles=list(panels),
        horizontal_spacing=0.09,
        vertical_spacing=0.24 / lines if lines > 1 else 0,
    )
    fig.update_layout(
        template=TEMPLATE, height=60 + 270 * lines, margin={"t": 84}, legend={"y": 1 + 50 / (270 * lines)}
    )
    fig.update_annotations(font_size=13)
    for index, panel in enumerate(panels.values()):
        _pairs(fig, panel, index // columns + 1, index % columns + 1, t)
    return fig


def _pairs(fig: go.Figure, panel: Sequence[Row], line: int, column: int, t: Translate) -> None:
    scale = 1e3 if panel[0]["unit"] == "s" else 1.0
    first = (line, column) == (1, 1)
    at = list(range(len(panel)))
    predicted = [row["predicted"] * scale for row in panel]
    fig.add_scatter(
        x=[place - SIDE for place in at],
        y=predicted,
        error_y={
            "type": "data",
            "symmetric": False,
            "thickness": 6,
            "width": 0,
            "color": translucent(PREDICTED, 0.35),
            "array": [row["high"] * scale - middle for row, middle in zip(panel, predicted, strict=True)],
            "arrayminus": [middle - row["low"] * scale for row, middle in zip(panel, predicted, strict=True)],
        },
        mode="markers",
        name=t("predicted"),
        legendgroup="predicted",
        showlegend=first,
        marker={"symbol": "circle-open", "size": 13, "color": PREDICTED, "line": {"width": 2.5, "color": PREDICTED}},
        hovertext=[f"{t('predicted')}{t('sign.colon')}{value(row, row['predicted'])}" for row in panel],
        hoverinfo="text",
        row=line,
        col=column,
    )
    fig.add_scatter(
        x=[place + SIDE for place in at],
        y=[row["measured"] * scale for row in panel],
        error_y={
            "type": "data",
            "thickness": 2,
            "width": 7,
            "array": [(row["spread"] or 0) * scale for row in panel],
        },
        mode="markers",
        name=t("measured"),
        legendgroup="measured",
        showlegend=first,
        marker={"symbol": "square", "size": 11, "color": MEASURED},
        hovertext=[f"{t('measured')}{t('sign.colon')}{value(row, row['measured'])}" for row in panel],
        hoverinfo="text",
        row=line,
        col=column,
    )
    fig.update_xaxes(
        tickvals=at,
        ticktext=[point_label(row["point"], t) for row in panel],
        range=[-0.6, len(panel) - 0.4],
        row=line,
        col=column,
    )
    fig.update_yaxes(title="ms" if panel[0]["unit"] == "s" else "tok/s", rangemode="tozero", row=line, col=column)


def alt_text(rows: Sequence[Row], t: Translate) -> str:
    """The chart in one sentence."""
    within = sum(row["low"] <= row["measured"] <= row["high"] for row in rows)
    return t("served.alt", metrics=len(rows), within=within)
