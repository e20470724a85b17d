"""How does an experiment look: lines of what was found over what was varied?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import plotly.graph_objects as go

from membound.app.experiments.finding import Finding, Row
from membound.app.figures.template import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, figure, log_ticks

_COLORS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "hexagon")
_DASHES = ("solid", "dash", "dot", "dashdot")


def experiment_figure(finding: Finding, worded: Callable[[str], str] = str) -> go.Figure:
    """The figure of an experiment: a line for each value of the chart's columns, with its spread as error bars.

    Solid where it was measured, hollow and dashed where it is predicted. `worded` says titles and lines in the
    reader's language.
    """
    chart, fig = finding.chart, figure(460)
    hollow = "" if finding.machine else "-open"
    x, y = chart.x, chart.y
    drawn = [row for row in finding.rows if _known(row.get(y.column)) and row.get(x.column) is not None]
    styles = itertools.product(_DASHES, range(len(_COLORS)))
    for key, (dash, index) in zip(dict.fromkeys(_line(row, chart.lines) for row in drawn), styles, strict=False):
        own = [row for row in drawn if _line(row, chart.lines) == key]
        spreads = [row.get(chart.spread) if chart.spread else None for row in own]
        fig.add_scatter(
            x=[row[x.column] for row in own],
            y=[row[y.column] for row in own],
            error_y={"type": "data", "array": spreads} if any(map(_known, spreads)) else None,
            name=worded(key),
            mode="lines+markers",
            line={"color": _COLORS[index], "dash": dash if finding.machine else "dash"},
            marker={"symbol": f"{_SYMBOLS[index]}{hollow}", "size": 9, "line": {"width": 2}},
        )
    fig.update_xaxes(title=worded(x.title), type="log" if x.log else None)
    if x.log:
        values = sorted({row[x.column] for row in drawn})
        if any(after < 1.2 * before for before, after in itertools.pairwise(values)):  # too near to be written each
            values = log_ticks(values[0], values[-1], (1, 2, 5))
        fig.update_xaxes(tickvals=values, ticktext=[f"{value:g}" for value in values])
    fig.update_yaxes(title=worded(y.title), type="log" if y.log else None, rangemode="normal" if y.log else "tozero")
    return fig


def _line(row: Row, columns: tuple[str, ...]) -> str:
    """The values that a line has in common; of a number, what it counts."""
    return ", ".join(
        f"{column} {row[column]:,}" if isinstance(row[column], int | float) else str(row[column]) for column in columns
    )


def _known(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
