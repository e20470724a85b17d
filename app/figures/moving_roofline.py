"""Where is a step under the roofs as its batch changes? A roofline whose step the browser alone moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from membound.app import text
from membound.app.figures.roofline import (
    STEP_COLORS,
    PlacedStep,
    Roofs,
    operator_traces,
    rates_axis,
    roofline_figure,
    series_trace,
    step_traces,
)
from membound.app.figures.template import BOUND_SYMBOLS, bound_words
from membound.app.i18n import Translate

# of the colours and symbols those before are for the step that moves and its plain engine
PINNED_FROM = 2
SLIDER_HEIGHT = 104


@dataclass(frozen=True)
class Place:
    """Where the slider can put the step: a batch, and the steps that are drawn there, the last with its operators."""

    batch: int
    steps: tuple[PlacedStep, ...]


@dataclass(frozen=True)
class Pinned:
    """A step that stays where it is beside the one that moves; `roofs` are its device's where that is another one."""

    step: PlacedStep
    number: int
    roofs: Roofs | None
    device: str


def moving_figure(
    roofs: Roofs,
    places: Sequence[Place],
    batch: int,
    t: Translate,
    *,
    pinned: Sequence[Pinned] = (),
) -> go.Figure:
    """The roofline of the step at `batch`, with a slider that moves it to others, drawn by the browser alone.

    Every place has the same traces, so that what moves is their data and not the chart.
    """
    at = next(index for index, place in enumerate(places) if place.batch == batch)
    fig = roofline_figure(roofs, (), t, height=460 + SLIDER_HEIGHT)
    _draw_pinned(fig, roofs, pinned, t)
    fixed = len(fig.data)
    held = {op.bound for place in places for op in place.steps[-1].cost.operators}
    bounds = [bound for bound in BOUND_SYMBOLS if bound in held]
    moving = [_moving_traces(place, bounds, roofs, t) for place in places]
    fig.add_traces(moving[at])
    indices = list(range(fixed, len(fig.data)))
    fig.frames = [
        go.Frame(name=str(place.batch), data=[_moved(trace) for trace in traces], traces=indices)
        for place, traces in zip(places, moving, strict=True)
    ]
    at_once = {"mode": "immediate", "frame": {"duration": 0, "redraw": False}, "transition": {"duration": 0}}
    steps = [
        {"label": str(place.batch), "method": "animate", "args": [[str(place.batch)], at_once]} for place in places
    ]
    prefix = t("roofline.slide") + " "
    fig.update_layout(
        sliders=[{"active": at, "steps": steps, "currentvalue": {"prefix": prefix}, "pad": {"t": 66, "b": 4}}],
        margin={"b": 56 + SLIDER_HEIGHT},
    )
    return fig


def _draw_pinned(fig: go.Figure, roofs: Roofs, pinned: Sequence[Pinned], t: Translate) -> None:
    """Pinned steps, each with a shape of its own, and the outline of each other device's roofs, named in the legend."""
    others = {one.device: (one.number, one.roofs) for one in pinned if one.roofs is not None}
    for device, (number, others_roofs) in others.items():
        bandwidth, rate = max(others_roofs.bandwidths.values()), max(others_roofs.rates.values())
        low, high = others_roofs.intensity_range
        fig.add_scatter(
            x=[low, rate / bandwidth, high],
            y=[low * bandwidth, rate, rate],
            mode="lines",
            name=t("pins.roofs", device=device),
            line={"color": STEP_COLORS[PINNED_FROM + number], "dash": "dashdot", "width": 1.5},
            hovertemplate=f"{t('pins.roofs', device=device)}<extra></extra>",
        )
    for one in pinned:
        fig.add_trace(series_trace(PINNED_FROM + one.number, one.step.series, [one.step], t))
    if others:
        ranges = [roofs.rate_range, *(held.rate_range for _, held in others.values())]
        rates_axis(fig, min(low for low, _ in ranges), max(high for _, high in ranges), t)


def _moving_traces(place: Place, bounds: Sequence[str], roofs: Roofs, t: Translate) -> list[dict[str, Any]]:
    cost = place.steps[-1].cost
    shares = cost.shares()
    bound = cost.bottleneck
    words = t(
        "roofline.at",
        batch=place.batch,
        time=text.seconds(float(cost.time_s)),
        bound=bound_words(bound, t),
        share=text.percent(float(shares[bound])),
    )
    said = {
        "type": "scatter",
        "x": [roofs.intensity_range[1]],
        "y": [roofs.rate_range[0] * 1.5],
        "mode": "text",
        "text": [words],
        "textposition": "top left",
        "textfont": {"size": 13},
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [*operator_traces(cost, bounds, t), *step_traces(place.steps, t), said]


def _moved(trace: dict[str, Any]) -> dict[str, Any]:
    """What of a trace differs from place to place."""
    changed: dict[str, Any] = {
        key: trace[key] for key in ("type", "x", "y", "text", "customdata", "hovertext", "error_y") if key in trace
    }
    if isinstance(trace.get("marker", {}).get("size"), list):
        changed["marker"] = {"size": trace["marker"]["size"]}
    return changed
