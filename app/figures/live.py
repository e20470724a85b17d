"""What is a run doing right now: tokens a second, sequences in the batch, KV blocks in use?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from membound.app.figures.template import BLUE, GREEN, MEASURED, TEMPLATE
from membound.app.i18n import Translate

Point = TypeVar("Point")

MOST_POINTS = 500
# as high as the longest name of a series
PANEL_PX = 150
# the keys of a live event, with the colour of each
SERIES = {"tokens_per_s": MEASURED, "running": BLUE, "kv_utilization": GREEN}


def live_figure(points: Sequence[tuple[float, Mapping[str, Any]]], t: Translate) -> go.Figure:
    """One panel a series over the seconds since the job started; measured, so solid. `meta` names a trace's series."""
    points = thinned(points)
    known = [key for key in SERIES if any(key in payload for _, payload in points)] or list(SERIES)
    fig = make_subplots(rows=len(known), cols=1, shared_xaxes=True, vertical_spacing=0.07)
    fig.update_layout(template=TEMPLATE, showlegend=False, height=PANEL_PX * len(known), title=t("live.chart"))
    for row, key in enumerate(known, start=1):
        present = [(at, payload[key]) for at, payload in points if key in payload]
        fig.add_scatter(
            x=[at for at, _ in present],
            y=[value for _, value in present],
            mode="lines",
            name=t(f"live.{key}"),
            meta=key,
            line={"color": SERIES[key], "width": 2, "shape": "linear" if key == "tokens_per_s" else "hv"},
            row=row,
            col=1,
        )
        shown = ".0%" if key == "kv_utilization" else None
        fig.update_yaxes(
            title={"text": t(f"live.{key}"), "font": {"size": 11}}, rangemode="tozero", tickformat=shown, row=row, col=1
        )
    fig.update_xaxes(title=t("live.x"), row=len(known), col=1)
    return fig


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about `MOST_POINTS` of the points, the newest among them: drawing costs the run that is measured."""
    stride = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::stride][::-1]
