"""How do latency and throughput move with the batch, and where does each roof cap them?"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from membound.app.figures.template import BLUE, GREY, ORANGE, SKY, TEMPLATE, VERMILLION, log_ticks, translucent
from membound.app.i18n import Translate
from membound.app.operating_point import SweepPoint


def sweep_figure(points: Sequence[SweepPoint], batch: int, t: Translate) -> go.Figure:
    """Step time above, tokens a second below, over the batch; predicted, so dashed with a band."""
    fig = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    fig.update_layout(template=TEMPLATE, height=380)
    batches = [point.batch for point in points]
    _band(fig, 1, batches, [p.low_s * 1e3 for p in points], [p.high_s * 1e3 for p in points])
    _line(fig, 1, batches, [p.time_s * 1e3 for p in points], t("sweep.predicted"), BLUE, "dash", legend=True)
    _band(fig, 2, batches, [p.low_tokens_per_s for p in points], [p.high_tokens_per_s for p in points])
    _line(fig, 2, batches, [p.tokens_per_s for p in points], t("sweep.predicted"), BLUE, "dash")
    memory = [p.memory_roof_tokens_per_s for p in points]
    compute = [p.compute_roof_tokens_per_s for p in points]
    _line(fig, 2, batches, memory, t("sweep.memory_roof"), ORANGE, "solid", legend=True, markers=False)
    _line(fig, 2, batches, compute, t("sweep.compute_roof"), VERMILLION, "dot", legend=True, markers=False)
    for column in (1, 2):
        fig.add_vline(x=batch, line={"color": GREY, "dash": "dashdot"}, row=1, col=column)
    fig.update_xaxes(type="log", title=t("sweep.x"), tickvals=batches, ticktext=[str(b) for b in batches])
    ticks = log_ticks(min(p.low_s for p in points) * 1e3, max(p.high_s for p in points) * 1e3, (1, 2, 3, 5, 7))
    fig.update_yaxes(
        title=t("sweep.time_y"), type="log", row=1, col=1, tickvals=ticks, ticktext=[f"{v:,g}" for v in ticks]
    )
    ceiling = max(p.high_tokens_per_s for p in points)
    fig.update_yaxes(title=t("sweep.rate_y"), range=[0, ceiling * 1.25], row=1, col=2, exponentformat="none")
    return fig


def alt_text(points: Sequence[SweepPoint], t: Translate) -> str:
    """The sweep in one sentence."""
    first, last = points[0], points[-1]
    return t(
        "sweep.alt",
        first=first.batch,
        last=last.batch,
        first_rate=f"{first.tokens_per_s:,.0f}",
        last_rate=f"{last.tokens_per_s:,.0f}",
    )


def _band(fig: go.Figure, column: int, x: list[int], low: list[float], high: list[float]) -> None:
    fig.add_scatter(
        x=x + x[::-1],
        y=high + low[::-1],
        fill="toself",
        fillcolor=translucent(SKY, 0.25),
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        row=1,
        col=column,
    )


def _line(
    fig: go.Figure,
    column: int,
    x: list[int],
    y: list[float],
    name: str,
    color: str,
    dash: str,
    *,
    legend: bool = False,
    markers: bool = True,
) -> None:
    fig.add_scatter(
        x=x,
        y=y,
        name=name,
        mode="lines+markers" if markers else "lines",
        showlegend=legend,
        legendgroup=name,
        line={"color": color, "dash": dash, "width": 2},
        marker={"symbol": "circle-open", "size": 8},
        row=1,
        col=column,
    )
