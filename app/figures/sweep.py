"""How do latency and throughput move with the batch, and where does each roof cap them?"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from membound.app.figures.template import BLUE, GREY, ORANGE, SKY, VERMILLION, band, figure, log_ticks
from membound.app.i18n import Translate
from membound.roofline.operating_point import SweepPoint


def time_figure(points: Sequence[SweepPoint], batch: int, t: Translate) -> go.Figure:
    """The time of a step over the batch; predicted, so dashed with a band."""
    fig = figure(380)
    batches = [point.batch for point in points]
    lows, highs = [p.low_s * 1e3 for p in points], [p.high_s * 1e3 for p in points]
    _band(fig, batches, lows, highs)
    _line(fig, batches, [p.time_s * 1e3 for p in points], t("sweep.predicted"), BLUE, "dash")
    _batch_axis(fig, batches, batch, t)
    ticks = log_ticks(min(lows), max(highs), (1, 2, 3, 5, 7))
    fig.update_yaxes(title=t("sweep.time_y"), type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])
    return fig


def rate_figure(points: Sequence[SweepPoint], batch: int, t: Translate) -> go.Figure:
    """Tokens a second over the batch, under what reading alone and computing alone would allow."""
    fig = figure(380)
    batches = [point.batch for point in points]
    _band(fig, batches, [p.low_tokens_per_s for p in points], [p.high_tokens_per_s for p in points])
    _line(fig, batches, [p.tokens_per_s for p in points], t("sweep.predicted"), BLUE, "dash")
    memory = [p.memory_roof_tokens_per_s for p in points]
    compute = [p.compute_roof_tokens_per_s for p in points]
    highest = 1.25 * max(p.high_tokens_per_s for p in points)
    for roof, name, color, dash in (
        (memory, "memory_roof", ORANGE, "solid"),
        (compute, "compute_roof", VERMILLION, "dot"),
    ):
        if min(roof) < highest:  # the legend names what the chart shows
            _line(fig, batches, roof, t(f"sweep.{name}"), color, dash, markers=False)
    _batch_axis(fig, batches, batch, t)
    fig.update_yaxes(title=t("sweep.rate_y"), range=[0, highest], exponentformat="none")
    return fig


def _batch_axis(fig: go.Figure, batches: list[int], batch: int, t: Translate) -> None:
    fig.add_vline(x=batch, line={"color": GREY, "dash": "dashdot"})
    fig.update_xaxes(type="log", title=t("sweep.x"), tickvals=batches, ticktext=[str(b) for b in batches])


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


def _band(fig: go.Figure, x: list[int], low: list[float], high: list[float]) -> None:
    band(fig, x + x[::-1], high + low[::-1], SKY, 0.16)


def _line(
    fig: go.Figure, x: list[int], y: list[float], name: str, color: str, dash: str, *, markers: bool = True
) -> None:
    fig.add_scatter(
        x=x,
        y=y,
        name=name,
        showlegend=True,
        mode="lines+markers" if markers else "lines",
        line={"color": color, "dash": dash, "width": 2},
        marker={"symbol": "circle-open", "size": 8},
    )
