"""What happened in a simulated run: latencies of each policy, and what bound the engine, queue and memory over time?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from membound.app import text
from membound.app.figures.template import (
    BLUE,
    BOUND_COLORS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    TEMPLATE,
    VERMILLION,
    band,
    figure,
    log_ticks,
    translucent,
)
from membound.app.i18n import Translate
from membound.app.serving import SHARES
from membound.roofline.results.result import BOUNDS, Column

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
# All are predicted, so all are dashed; no two alike.
DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot", "6px,2px,2px,2px,2px,2px")
BOUND_PATTERNS = {"memory_weights": "", "memory_kv": "x", "compute": "/", "link": "-", "overhead": ".", "idle": ""}
MOST_STEPS = 300
# Latencies that are times of steps; in the others there is a queue, which grows faster than a step's time.
OF_STEPS = ("tpot_s", "itl_s")


def latency_figure(
    cases: Sequence[Mapping[str, Any]], metric: str, objective_s: float | None, t: Translate
) -> go.Figure:
    """The share of requests, or of gaps, that a latency does not exceed, for each policy; the objective as a line."""
    fig = figure(400)
    scale, unit, lows, highs = _unit(cases, metric)
    for at, case in enumerate(cases):
        values = case["quantiles"].get(metric)
        if values is None:
            continue
        if metric in OF_STEPS:
            _interval(fig, [value * scale for value in values], case["relative_error"], COLORS[at % len(COLORS)])
        fig.add_scatter(
            x=[value * scale for value in values],
            y=[share * 100 for share in SHARES],
            mode="lines",
            name=t(f"simulate.case_{case['name']}"),
            line={"color": COLORS[at % len(COLORS)], "dash": DASHES[at % len(DASHES)], "width": 2.5},
            hovertemplate="%{y:.1f} % ≤ %{x:,.4g} " + unit + "<extra>%{fullData.name}</extra>",
        )
    if objective_s is not None:
        fig.add_vline(x=objective_s * scale, line={"color": GREY, "width": 2})
        # on a logarithmic axis a line has values, an annotation their logarithm
        fig.add_annotation(
            x=math.log10(objective_s * scale), y=0.06, yref="paper", xanchor="right", showarrow=False,
            text=t("simulate.objective", value=text.seconds(objective_s)) + " ", font={"size": 12},
        )  # fmt: skip
        lows, highs = [*lows, objective_s * scale], [*highs, objective_s * scale]
    fig.add_hline(y=99, line={"color": GREY, "dash": "dot"}, annotation={"text": "p99", "font": {"size": 11}})
    low, high = max(min(lows, default=1.0), max(highs, default=1.0) / 1e5), max(highs, default=1.0)
    ticks = log_ticks(low / 1.3, high * 1.3, (1, 2, 5))
    span = [math.log10(low / 1.3), math.log10(high * 1.3)]
    axis = {"tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks], "range": span}
    fig.update_xaxes(title=f"{t(f'simulate.metric_{metric}')}{t('sign.comma')}{unit}", type="log", **axis)
    fig.update_yaxes(title=t("simulate.share_y"), range=[0, 101])
    return fig


def _interval(fig: go.Figure, values: list[float], relative_error: float, color: str) -> None:
    """As wide as the interval of a step's time, which these latencies are made of."""
    low, high = ([value * by for value in values] for by in (1 / (1 + relative_error), 1 + relative_error))
    shares = [share * 100 for share in SHARES]
    band(fig, low + high[::-1], shares + shares[::-1], color, 0.12)


def _unit(cases: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, str, list[float], list[float]]:
    """Milliseconds where most values are below a second, and the range in that unit."""
    listed = [case["quantiles"][metric] for case in cases if case["quantiles"].get(metric)]
    median = float(np.median([values[len(values) // 2] for values in listed])) if listed else 0.0
    scale, unit = (1e3, "ms") if median < 1 else (1.0, "s")
    return scale, unit, [values[0] * scale for values in listed], [values[-1] * scale for values in listed]


def latency_alt(cases: Sequence[Mapping[str, Any]], metric: str, t: Translate) -> str:
    """The 99th percentile of each policy, in one sentence."""
    said = [
        t(f"simulate.case_{case['name']}") + f" {text.seconds(case['summary'][metric]['p99'])}"
        for case in cases
        if case["summary"][metric]["p99"] is not None
    ]
    return t("simulate.latency_alt", metric=t(f"simulate.metric_{metric}"), listed=t("sign.list").join(said))


def time_figure(over_time: Mapping[str, Any], t: Translate) -> go.Figure:
    """Three panels over the run: engines by what binds them, requests, KV memory."""
    edges = over_time["edges_s"]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    fig = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.4, 0.3, 0.3])
    fig.update_layout(template=TEMPLATE, height=660, legend={"y": 1.02})
    for bound in BOUNDS:
        values = over_time["bounds"].get(bound)
        if values is None or not any(values):
            continue
        fig.add_scatter(
            x=middles,
            y=values,
            name=t(f"bound.{bound}"),
            stackgroup="bounds",
            mode="lines",
            line={"width": 0.8, "color": BOUND_COLORS[bound]},
            fillpattern={
                "shape": BOUND_PATTERNS[bound],
                "fgcolor": BOUND_COLORS[bound],
                "bgcolor": translucent(BOUND_COLORS[bound], 0.35),
                "size": 6,
                "solidity": 0.4,
            },
            hovertemplate="%{y:.2f}<extra>%{fullData.name}</extra>",
            row=1,
            col=1,
        )
    for name, color, dash in (("running", BLUE, "dash"), ("waiting", VERMILLION, "dot")):
        fig.add_scatter(
            x=middles,
            y=over_time[name],
            name=t(f"simulate.{name}"),
            mode="lines",
            line={"color": color, "dash": dash, "width": 2},
            hovertemplate="%{y:.1f}<extra>%{fullData.name}</extra>",
            row=2,
            col=1,
        )
    fig.add_scatter(
        x=middles,
        y=over_time["kv_gib"],
        name=t("simulate.kv"),
        mode="lines",
        line={"color": PURPLE, "dash": "dash", "width": 2},
        fill="tozeroy",
        fillcolor=translucent(PURPLE, 0.15),
        hovertemplate="%{y:.2f} GiB<extra></extra>",
        row=3,
        col=1,
    )
    capacity = over_time["kv_capacity_gib"]
    if capacity is not None:
        fig.add_scatter(
            x=[edges[0], edges[-1]],
            y=[capacity, capacity],
            name=t("simulate.kv_capacity"),
            mode="lines",
            line={"color": GREY, "width": 2},
            hovertemplate="%{y:.1f} GiB<extra></extra>",
            row=3,
            col=1,
        )
    engines = over_time["engines"]
    top = engines if engines is not None else None
    fig.update_yaxes(title=t("simulate.engines_y"), range=None if top is None else [0, top * 1.02], row=1, col=1)
    fig.update_yaxes(title=t("simulate.requests_y"), rangemode="tozero", row=2, col=1)
    fig.update_yaxes(title=t("simulate.kv_y"), rangemode="tozero", row=3, col=1)
    fig.update_xaxes(title=t("simulate.time_x"), row=3, col=1)
    return fig


def time_alt(over_time: Mapping[str, Any], t: Translate) -> str:
    """The highest queue and memory, in one sentence."""
    return t(
        "simulate.time_alt",
        seconds=f"{over_time['edges_s'][-1]:,.0f}",
        running=f"{max(over_time['running']):,.0f}",
        waiting=f"{max(over_time['waiting']):,.0f}",
        kv=text.digits(max(over_time["kv_gib"])),
    )


def steps_figure(steps: Mapping[str, Column], t: Translate) -> go.Figure:
    """Each step as a bar: as wide as its time, as high as the tokens that it computes, in the colour of its bound."""
    fig = figure(320)
    shares = np.stack([steps[bound] for bound in BOUNDS])
    strongest = shares.argmax(axis=0) if shares.size else np.zeros(0, dtype=int)
    for index, bound in enumerate(BOUNDS):
        of = strongest == index
        if not of.any():
            continue
        starts, times, count = steps["start_s"][of], steps["time_s"][of], steps["steps"][of]
        fig.add_bar(
            x=starts + times / 2,
            width=times,
            y=steps["tokens"][of],
            name=t(f"bound.{bound}"),
            marker={
                "color": translucent(BOUND_COLORS[bound], 0.45),
                "line": {"color": BOUND_COLORS[bound], "width": 0.5},
                "pattern": {"shape": BOUND_PATTERNS[bound], "solidity": 0.3, "size": 6},
            },
            text=[
                t(
                    "simulate.step_hover",
                    steps=f"{n:,.0f}",
                    time=text.seconds(float(s / n)),
                    tokens=f"{tokens:,.0f}",
                    sequences=f"{sequences:,.0f}",
                )
                for n, s, tokens, sequences in zip(
                    count, times, steps["tokens"][of], steps["sequences"][of], strict=True
                )
            ],
            textposition="none",
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
    fig.update_layout(barmode="overlay", bargap=0)
    fig.update_xaxes(title=t("simulate.time_x"), tickformat=",.6~g")
    fig.update_yaxes(title=t("simulate.tokens_y"), type="log" if len(strongest) else "linear")
    return fig
