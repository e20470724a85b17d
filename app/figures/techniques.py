"""What does each technique gain at an operating point, and from where on does it gain no more?

Gains are ratios, so their axis is logarithmic: twice as fast and half as fast are equally far from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from membound.app import text
from membound.app.figures.template import (
    BLUE,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    PREDICTED,
    PURPLE,
    VERMILLION,
    band,
    figure,
    translucent,
)
from membound.app.i18n import Translate

ROW_HEIGHT = 34
TICKS = (0.125, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
# Okabe and Ito's colours, each with a symbol and a dash of its own.
STYLES = (
    (BLUE, "circle-open", "dash"),
    (VERMILLION, "square-open", "dashdot"),
    (GREEN, "diamond-open", "longdash"),
    (PURPLE, "triangle-up-open", "dot"),
    (ORANGE, "x-thin-open", "longdashdot"),
)


@dataclass(frozen=True)
class Gain:
    """A technique's predicted gain with its interval, and what was measured near the operating point."""

    title: str
    predicted: float
    low: float
    high: float
    measured: float | None = None
    spread: float | None = None


@dataclass(frozen=True)
class Curve:
    """A technique's gain over batch or context; `crossings` are where it passes 1, `measured` has points and spread."""

    title: str
    xs: tuple[float, ...]
    gains: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    crossings: tuple[float, ...] = ()
    measured: tuple[tuple[float, float, float], ...] = ()


def gains_figure(gains: Sequence[Gain], t: Translate) -> go.Figure:
    """One row a technique, the largest gain on top: hollow with a band is predicted, solid with a bar measured."""
    rows = sorted(gains, key=lambda gain: gain.predicted)
    fig = figure(110 + ROW_HEIGHT * len(rows))
    fig.add_vline(x=1, line={"color": GREY, "dash": "dash"})
    fig.add_scatter(
        x=[gain.predicted for gain in rows],
        y=list(range(len(rows))),
        mode="markers",
        name=t("predicted"),
        marker={"symbol": "circle-open", "size": 12, "color": PREDICTED, "line": {"width": 2.5, "color": PREDICTED}},
        error_x={
            "type": "data",
            "symmetric": False,
            "thickness": 6,
            "width": 0,
            "color": translucent(PREDICTED, 0.35),
            "array": [gain.high - gain.predicted for gain in rows],
            "arrayminus": [gain.predicted - gain.low for gain in rows],
        },
        hovertext=[f"{gain.title}: {text.gain(gain.predicted)} ({gain.low:.2f}–{gain.high:.2f})" for gain in rows],
        hoverinfo="text",
    )
    done = [(index, gain, gain.measured) for index, gain in enumerate(rows) if gain.measured is not None]
    if done:
        fig.add_scatter(
            x=[value for _, _, value in done],
            y=[index - 0.22 for index, _, _ in done],
            mode="markers",
            name=t("measured"),
            marker={"symbol": "square", "size": 10, "color": MEASURED},
            error_x={"type": "data", "thickness": 2, "width": 6, "array": [gain.spread or 0.0 for _, gain, _ in done]},
            hovertext=[f"{gain.title}: {text.gain(value)}" for _, gain, value in done],
            hoverinfo="text",
        )
    fig.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[gain.title for gain in rows],
        range=[-0.6, len(rows) - 0.4],
        ticks="",
        automargin=True,
    )
    ends = [end for gain in rows for end in (gain.low, gain.high, gain.measured or 1.0, 1.0)]
    _gain_axis(fig.update_xaxes, ends, t("techniques.gain_axis"))
    fig.update_layout(margin={"l": 8, "b": 48, "t": 48}, showlegend=True)
    return fig


def sweep_figure(curves: Sequence[Curve], chosen: float, x_title: str, t: Translate) -> go.Figure:
    """Gains over batch or context with bands; an X where a curve passes 1, a vertical line at the chosen point."""
    fig = figure(430)
    fig.add_hline(y=1, line={"color": GREY, "dash": "dash"})
    fig.add_vline(x=chosen, line={"color": GREY, "dash": "dashdot"})
    ends = [1.0]
    for curve, (color, symbol, dash) in zip(curves, STYLES, strict=False):
        xs, around = [*curve.xs, *reversed(curve.xs)], [*curve.high, *reversed(curve.low)]
        band(fig, xs, around, color, 0.09, legendgroup=curve.title)
        fig.add_scatter(
            x=curve.xs,
            y=curve.gains,
            mode="lines+markers",
            name=curve.title,
            legendgroup=curve.title,
            line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 8, "color": color, "line": {"width": 2, "color": color}},
            hovertext=[
                f"{curve.title}, {x:,.0f}: {text.gain(y)} ({low:.2f}–{high:.2f})"
                for x, y, low, high in zip(curve.xs, curve.gains, curve.low, curve.high, strict=True)
            ],
            hoverinfo="text",
        )
        fig.add_scatter(
            x=curve.crossings,
            y=[1.0] * len(curve.crossings),
            mode="markers",
            marker={"symbol": "x", "size": 13, "color": color, "line": {"width": 1, "color": "white"}},
            hovertext=[t("techniques.crossing_hover", technique=curve.title, x=f"{x:,.0f}") for x in curve.crossings],
            hoverinfo="text",
            showlegend=False,
            legendgroup=curve.title,
        )
        if curve.measured:
            fig.add_scatter(
                x=[x for x, _, _ in curve.measured],
                y=[y for _, y, _ in curve.measured],
                mode="markers",
                name=t("techniques.measured_series", technique=curve.title),
                marker={"symbol": symbol.removesuffix("-open"), "size": 11, "color": color},
                error_y={"type": "data", "thickness": 2, "width": 6, "array": [s for _, _, s in curve.measured]},
                legendgroup=curve.title,
            )
        ends += [*curve.low, *curve.high, *(y for _, y, _ in curve.measured)]
    _gain_axis(fig.update_yaxes, ends, t("techniques.gain_axis"))
    _count_axis(fig, sorted({x for curve in curves for x in curve.xs}), x_title)
    return fig


def experts_figure(
    batches: Sequence[int],
    series: Sequence[tuple[str, Sequence[float]]],
    chosen: int,
    full_at: float | None,
    full: float,
    t: Translate,
) -> go.Figure:
    """The share of a layer's experts that a step reads over the batch, of plain steps and of steps with guesses; an X
    where plain steps read the share `full`."""
    fig = figure(360)
    fig.add_vline(x=chosen, line={"color": GREY, "dash": "dashdot"})
    for (name, shares), (color, symbol, dash) in zip(series, STYLES, strict=False):
        fig.add_scatter(
            x=list(batches),
            y=[share * 100 for share in shares],
            mode="lines+markers",
            name=name,
            line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 8, "color": color, "line": {"width": 2, "color": color}},
            hovertemplate="%{x:,}: %{y:.0f} %<extra></extra>",
        )
    if full_at is not None:
        fig.add_scatter(
            x=[full_at],
            y=[full * 100],
            mode="markers",
            marker={"symbol": "x", "size": 13, "color": BLUE, "line": {"width": 1, "color": "white"}},
            hoverinfo="skip",
            showlegend=False,
        )
    fig.update_yaxes(title=t("techniques.experts_y"), range=[0, 105], ticksuffix=" %")
    _count_axis(fig, [float(batch) for batch in batches], t("sweep.x"))
    return fig


def _gain_axis(update: object, ends: Sequence[float], title: str) -> None:
    low, high = min(ends) / 1.06, max(ends) * 1.06
    ticks = [tick for tick in TICKS if low <= tick <= high]
    assert callable(update)
    update(
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=[f"{tick:g}×" for tick in ticks],
        title=title,
    )


def _count_axis(fig: go.Figure, values: Sequence[float], title: str) -> None:
    fig.update_xaxes(
        type="log",
        title=title,
        tickvals=list(values),
        ticktext=[f"{value / 1024:g}k" if value >= 1024 else f"{value:g}" for value in values],
    )
