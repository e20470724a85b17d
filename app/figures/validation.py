"""Do predictions agree with measurements: row by row on the diagonal, group by group, and as promised?"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from membound.app import judged, text
from membound.app.figures.template import (
    BLUE,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    PREDICTED,
    PURPLE,
    SKY,
    VERMILLION,
    figure,
    log_ticks,
    translucent,
)
from membound.app.i18n import Translate

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "hexagon", "pentagon")
# Error bars of more rows of a group than this hide the points; markers of more are drawn by WebGL.
MOST_BARS, MOST_MARKERS = 60, 600
MOST_GROUPS = 12
# By what a value is multiplied to be drawn, and its unit then, by what the metric's name holds.
UNITS = {
    "tpot_s": (1e3, "ms"),
    "gain": (1.0, "×"),
    "speedup_x": (1.0, "×"),
    "tok_s": (1.0, "tok/s"),
    "req_s": (1.0, "/s"),
    "_us": (1.0, "µs"),
    "_ms": (1.0, "ms"),
}


def unit_of(metric: str) -> tuple[float, str]:
    """By what a metric's values are multiplied to be drawn, and the unit that they then have."""
    return next((found for part, found in UNITS.items() if part in metric), (1.0, metric))


def scatter_figure(rows: pd.DataFrame, metric: str, by: str, t: Translate) -> go.Figure:
    """Predicted over measured, both on logarithmic axes; a cross is outside of its predicted interval."""
    fig = figure(520)
    scale, unit = unit_of(metric)
    drawn = rows.assign(**{name: rows[name] * scale for name in ("measured", "predicted", "low", "high", "spread")})
    drawn = drawn.assign(
        named=drawn["device"] + ", " + drawn["model"] + ", " + drawn["what"], error=judged.error_of(drawn)
    )
    low = float(drawn[["measured", "predicted"]].min().min()) / 1.25
    high = float(drawn[["measured", "predicted"]].max().max()) * 1.25
    for factor, dash in ((1.0, "solid"), (1.2, "dot"), (1 / 1.2, "dot")):
        fig.add_scatter(
            x=[low, high],
            y=[low * factor, high * factor],
            mode="lines",
            line={"color": GREY, "dash": dash, "width": 1.5 if factor == 1 else 1},
            name=t("validate.diagonal" if factor == 1 else "validate.off_20"),
            showlegend=factor >= 1,
            hoverinfo="skip",
        )
    groups = drawn[by].astype(str)
    names = groups.value_counts().index.tolist()
    for at, name in enumerate(names[: len(COLORS)]):
        _points(fig, drawn[groups == name], name or "–", COLORS[at], SYMBOLS[at], unit, t)
    if rest := names[len(COLORS) :]:
        others = drawn[groups.isin(rest)]
        _points(fig, others, t("validate.others", groups=len(rest)), GREY, "circle", unit, t)
    mantissas = (1,) if high / low > 1e4 else (1, 2, 5) if high / low > 20 else tuple(range(1, 10))
    ticks = log_ticks(low, high, mantissas)
    span = [math.log10(low), math.log10(high)]
    axis = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks], "range": span}
    fig.update_xaxes(title=t("validate.measured_x", unit=unit), **axis)
    fig.update_yaxes(title=t("validate.predicted_y", unit=unit), **axis)
    return fig


def _points(fig: go.Figure, rows: pd.DataFrame, name: str, color: str, symbol: str, unit: str, t: Translate) -> None:
    """The rows of a group, those outside of their interval as crosses."""
    within = judged.is_within(rows)
    for of, shape in ((rows[within], f"{symbol}-open"), (rows[~within], "x-open")):
        if of.empty:
            continue
        few = len(rows) <= MOST_BARS
        trace = {
            "x": of["measured"],
            "y": of["predicted"],
            "mode": "markers",
            "name": name,
            "legendgroup": name,
            "showlegend": shape != "x-open" or not within.any(),
            "marker": {"color": color, "symbol": shape, "size": 9 if few else 6, "line": {"width": 1.5 if few else 1}},
            "error_y": _bars(of["high"] - of["predicted"], of["predicted"] - of["low"]) if few else None,
            "error_x": _bars(of["spread"].fillna(0.0), of["spread"].fillna(0.0)) if few else None,
            "customdata": of[["named", "low", "high", "error"]].to_numpy(),
            "hovertemplate": _hover(unit, t),
        }
        fig.add_trace(go.Scattergl(**trace) if len(rows) > MOST_MARKERS else go.Scatter(**trace))


def _bars(above: pd.Series, below: pd.Series) -> dict[str, object]:
    bars = {"type": "data", "array": above, "arrayminus": below, "symmetric": False}
    return bars | {"thickness": 1, "width": 2}


def _hover(unit: str, t: Translate) -> str:
    """Filled in by the browser, since rows are many."""
    said = t(
        "validate.hover",
        measured="%{x:,.3r}",
        predicted="%{y:,.3r}",
        low="%{customdata[1]:,.3r}",
        high="%{customdata[2]:,.3r}",
        error="%{customdata[3]:+.1%}",
    )
    return f"%{{customdata[0]}}<br>{said} ({unit})<extra></extra>"


def scatter_alt(rows: pd.DataFrame, t: Translate) -> str:
    """The scatter in one sentence."""
    errors = judged.errors_by(rows).iloc[0]
    return t(
        "validate.scatter_alt",
        rows=f"{len(rows):,}",
        median=text.percent(errors["median"]),
        within=text.percent(errors["within"]),
    )


def groups_figure(errors: pd.DataFrame, t: Translate) -> go.Figure:
    """Median and 90th percentile of the error of the largest groups."""
    shown = errors.head(MOST_GROUPS)
    fig = figure(90 + 34 * max(3, len(shown)))
    names = [f"{name or '–'} ({rows:,})" for name, rows in zip(shown["group"], shown["rows"], strict=True)]
    fig.add_bar(
        y=names,
        x=shown["median"] * 100,
        orientation="h",
        name=t("validate.median"),
        marker={"color": translucent(PREDICTED, 0.3), "line": {"color": BLUE, "width": 1.5}},
        hovertemplate="%{x:.1f} %<extra>%{fullData.name}</extra>",
    )
    fig.add_scatter(
        y=names,
        x=shown["p90"] * 100,
        mode="markers",
        name=t("validate.p90"),
        marker={"symbol": "line-ns-open", "size": 14, "color": VERMILLION, "line": {"width": 2.5}},
        hovertemplate="%{x:.1f} %<extra>%{fullData.name}</extra>",
    )
    highest = float(np.nanmax(shown["p90"], initial=0.0)) * 100
    fig.update_xaxes(title=t("validate.error_x"), range=[0, highest * 1.08 or 1.0])
    _named_rows(fig, names)
    return fig


def promises_figure(promises: pd.DataFrame, t: Translate) -> go.Figure:
    """What was reached of what is promised: a bar that ends before its mark keeps the promise."""
    fig = figure(90 + 34 * len(promises))
    fig.add_bar(
        y=promises["what"],
        x=promises["reached"] * 100,
        orientation="h",
        name=t("validate.reached"),
        marker={"color": translucent(PREDICTED, 0.3), "line": {"color": BLUE, "width": 1.5}},
        hovertemplate="%{x:.1f} %<extra>%{fullData.name}</extra>",
    )
    fig.add_scatter(
        y=promises["what"],
        x=promises["promised"] * 100,
        mode="markers",
        name=t("validate.promised"),
        marker={"symbol": "line-ns-open", "size": 16, "color": MEASURED, "line": {"width": 2.5}},
        hovertemplate="%{x:.0f} %<extra>%{fullData.name}</extra>",
    )
    fig.update_xaxes(title=t("validate.error_x"), rangemode="tozero")
    _named_rows(fig, list(promises["what"]))
    return fig


def _named_rows(fig: go.Figure, names: list[str]) -> None:
    """The first on top; a narrow screen breaks the names that the axis lists into lines."""
    fig.update_yaxes(autorange="reversed", showgrid=False, automargin=True, categoryarray=names)
