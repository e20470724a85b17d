"""Where is each operator of a step under the roofs of its device, and how much of the time is it?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from membound.app import text
from membound.app.figures.template import (
    BLUE,
    BOUND_COLORS,
    BOUND_SYMBOLS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILLION,
    figure,
    log_ticks,
)
from membound.app.i18n import Translate
from membound.roofline.cost import OperatorCost, StepCost
from membound.roofline.hardware import HardwareSpec

INTENSITIES = (0.1, 1e4)  # FLOP/byte that the chart spans
BEHIND_THE_RIDGE = 10.0
STEP_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE)
STEP_SYMBOLS = ("star", "star-diamond", "hourglass", "bowtie", "cross")
LARGEST_MARKER, SMALLEST_MARKER = 34.0, 7.0
# markers with less of the step's time have no label, and a label names so many operators; hovering shows all
LEAST_NAMED_SHARE, MOST_NAMES = 0.02, 3
# spaces that keep a name off the marker that it is anchored to
NAME_INDENT = "\u2003" * 2


@dataclass(frozen=True)
class Roofs:
    """The roofs of a device: bandwidths in bytes/s by memory level, matrix rates in FLOP/s by format."""

    bandwidths: dict[str, float]
    rates: dict[str, float]
    calibrated: bool
    intensity_range: tuple[float, float] = INTENSITIES

    @property
    def around_the_ridge(self) -> Roofs:
        """The same roofs where decode steps lie: the power of ten well behind the last ridge is the end."""
        last = max(self.rates.values()) / min(self.bandwidths.values())
        end = 10.0 ** math.ceil(math.log10(BEHIND_THE_RIDGE * last))
        return replace(self, intensity_range=(INTENSITIES[0], min(end, INTENSITIES[1])))

    @property
    def rate_range(self) -> tuple[float, float]:
        """From a hundredth of what memory feeds at 1 FLOP/byte to twice the fastest matrix rate: fixed per device."""
        return min(self.bandwidths.values()) / 100, max(self.rates.values()) * 2


@dataclass(frozen=True)
class PlacedStep:
    """A whole step on the chart: the series it belongs to, what tells it apart there, and its cost."""

    series: str
    label: str
    cost: StepCost


def roofs_of(hardware: HardwareSpec) -> Roofs:
    """What a calibrated device was measured to have, by memory level; else its data sheet's."""
    calibration = hardware.calibration
    if calibration is None:
        rates = {name: rate for name, rate in hardware.matrix_flops.items() if name in ("bf16", "fp16", "fp8", "int8")}
        return Roofs({"memory": hardware.bandwidth_bytes_per_s}, rates or dict(hardware.matrix_flops), False)
    cache = max(point.bytes_per_s for point in calibration.bandwidth)
    return Roofs({"cache": cache, "memory": calibration.memory_bandwidth}, dict(hardware.matrix_flops), True)


def roofline_figure(
    roofs: Roofs, steps: Sequence[PlacedStep], t: Translate, *, operators: bool = True, height: int = 460
) -> go.Figure:
    """Roofs with the total of each named step and, of the last one, its operators sized by their share of time."""
    fig = figure(height)
    _draw_roofs(fig, roofs, t)
    if operators and steps:
        _draw_operators(fig, steps[-1].cost, t)
    _draw_steps(fig, steps, t)
    x_ticks = log_ticks(*roofs.intensity_range)
    fig.update_xaxes(
        type="log",
        range=np.log10(roofs.intensity_range).tolist(),
        title=t("roofline.x"),
        tickvals=x_ticks,
        ticktext=[f"{tick:,g}" for tick in x_ticks],
    )
    rates_axis(fig, *roofs.rate_range, t)
    return fig


def rates_axis(fig: go.Figure, low: float, high: float, t: Translate) -> None:
    """The axis of FLOP/s, from `low` to `high`."""
    ticks = log_ticks(low, high)
    fig.update_yaxes(
        type="log",
        range=np.log10([low, high]).tolist(),
        title=t("roofline.y"),
        tickvals=ticks,
        ticktext=[text.flop_rate(tick, 1) for tick in ticks],
    )


def _draw_roofs(fig: go.Figure, roofs: Roofs, t: Translate) -> None:
    dash = "solid" if roofs.calibrated else "dot"
    kind = t("roofline.calibrated") if roofs.calibrated else t("roofline.datasheet")
    fastest_rate = max(roofs.rates.values())
    fastest_bandwidth = max(roofs.bandwidths.values())
    for index, (level, bandwidth) in enumerate(sorted(roofs.bandwidths.items(), key=lambda item: -item[1])):
        ridge = fastest_rate / bandwidth
        x = np.geomspace(roofs.intensity_range[0], ridge, 60)
        label = f"{t(f'level.{level}')} {text.bandwidth(bandwidth)}"
        fig.add_scatter(
            x=x,
            y=x * bandwidth,
            mode="lines",
            name=label,
            line={"color": (GREY, BLUE)[index % 2], "dash": dash},
            hovertemplate=f"{label} ({kind})<br>%{{x:.3g}} FLOP/byte<extra></extra>",
            showlegend=False,
        )
        _label_bandwidth(fig, label, bandwidth, ridge if index < len(roofs.bandwidths) - 1 else None, roofs)
    for name, rate in roofs.rates.items():
        label = f"{name} {text.flop_rate(rate)}"
        x = np.geomspace(rate / fastest_bandwidth, roofs.intensity_range[1], 60)
        fig.add_scatter(
            x=x,
            y=np.full_like(x, rate),
            mode="lines",
            name=label,
            line={"color": GREY, "dash": dash},
            hovertemplate=f"{label} ({kind})<extra></extra>",
            showlegend=False,
        )
    _label_rates(fig, roofs)


def _label_bandwidth(fig: go.Figure, label: str, bandwidth: float, ridge: float | None, roofs: Roofs) -> None:
    """Names a roof on the side where its line is not: left of the upper ones' ridge, below the lowest."""
    at = roofs.intensity_range[0] * 2.2 if ridge is None else ridge * 0.6
    fig.add_annotation(
        x=np.log10(at),
        y=np.log10(at * bandwidth),
        text=label,
        showarrow=False,
        xanchor="left" if ridge is None else "right",
        yanchor="top" if ridge is None else "bottom",
        yshift=-4 if ridge is None else 4,
        font={"size": 12},
    )


def _label_rates(fig: go.Figure, roofs: Roofs) -> None:
    """One label for each rate, and one for rates too close to read apart."""
    groups: list[list[tuple[str, float]]] = []
    for name, rate in sorted(roofs.rates.items(), key=lambda item: item[1]):
        if groups and rate < groups[-1][0][1] * 1.35:
            groups[-1].append((name, rate))
        else:
            groups.append([(name, rate)])
    for group in groups:
        label = f"{'/'.join(name for name, _ in group)} {_between(group[0][1], group[-1][1])}"
        fig.add_annotation(
            x=np.log10(roofs.intensity_range[1]),
            y=np.log10(group[-1][1]),
            text=label,
            showarrow=False,
            xanchor="right",
            yanchor="bottom",
            font={"size": 12},
        )


def _between(low: float, high: float) -> str:
    """One rate, or two that are of about the same size: "291–304 GFLOP/s"."""
    first, last = text.flop_rate(low), text.flop_rate(high)
    if first == last:
        return last
    number, unit = first.split(" ")
    return f"{number}–{last}" if last.endswith(f" {unit}") else f"{first} – {last}"


def _draw_operators(fig: go.Figure, cost: StepCost, t: Translate) -> None:
    for trace in operator_traces(cost, list(BOUND_SYMBOLS), t):
        if trace["x"]:
            fig.add_trace(trace)


def operator_traces(cost: StepCost, bounds: Sequence[str], t: Translate) -> list[dict[str, Any]]:
    """A trace for each bound, empty where nothing is held by it, and one that names the operators.

    Hollow markers, because they are predicted; an operator without FLOPs has no place on a log axis.
    """
    shown = [op for op in cost.operators if float(op.operator.flops) > 0]
    return [
        *(_held(cost, [op for op in shown if op.bound == bound], bound, t) for bound in bounds),
        _named(cost, shown),
    ]


def _held(cost: StepCost, held: Sequence[OperatorCost], bound: str, t: Translate) -> dict[str, Any]:
    shares = [float(op.total_s / cost.time_s) for op in held]
    return {
        "type": "scatter",
        "x": [_intensity(op) for op in held],
        "y": [rate_of(op) for op in held],
        "mode": "markers",
        "name": t(f"bound.{bound}"),
        "customdata": [op.operator.name for op in held],
        "marker": {
            "symbol": f"{BOUND_SYMBOLS[bound]}-open",
            "color": BOUND_COLORS[bound],
            "size": [SMALLEST_MARKER + LARGEST_MARKER * share**0.5 for share in shares],
            "line": {"width": 2, "color": BOUND_COLORS[bound]},
        },
        "hovertext": [
            t(
                "roofline.operator_hover",
                operator=op.operator.name,
                share=text.percent(share),
                time=text.seconds(float(op.total_s)),
                bound=t(f"bound.{bound}"),
            )
            for op, share in zip(held, shares, strict=True)
        ],
        "hoverinfo": "text",
    }


def _named(cost: StepCost, shown: Sequence[OperatorCost]) -> dict[str, Any]:
    """The names of the operators that take longest, right of and below their markers."""
    least_s = LEAST_NAMED_SHARE * float(cost.time_s)
    clusters = [cluster for cluster in _clusters(shown) if sum(float(op.total_s) for op in cluster) >= least_s]
    lowest = [min(cluster, key=rate_of) for cluster in clusters]
    return {
        "type": "scatter",
        "x": [_intensity(op) for op in lowest],
        "y": [rate_of(op) for op in lowest],
        "mode": "text",
        "text": [f"{NAME_INDENT}{_names(cluster)}" for cluster in clusters],
        "textposition": "bottom right",
        "textfont": {"size": 11},
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _names(cluster: Sequence[OperatorCost]) -> str:
    """The operators of a cluster that take longest, and how many more there are: a label must not hide the chart."""
    longest = sorted(cluster, key=lambda op: -float(op.total_s))
    named = ", ".join(op.operator.name for op in longest[:MOST_NAMES])
    return f"{named} +{len(cluster) - MOST_NAMES}" if len(cluster) > MOST_NAMES else named


def _clusters(operators: Sequence[OperatorCost]) -> list[list[OperatorCost]]:
    """Operators that share a label, because they lie within a quarter of a decade of the first of them."""
    clusters: list[list[OperatorCost]] = []
    for op in operators:
        for cluster in clusters:
            apart = np.log10([_intensity(op) / _intensity(cluster[0]), rate_of(op) / rate_of(cluster[0])])
            if np.all(np.abs(apart) < 0.25):
                cluster.append(op)
                break
        else:
            clusters.append([op])
    return clusters


def _intensity(op: OperatorCost) -> float:
    return float(op.operator.flops / op.operator.bytes)


def _draw_steps(fig: go.Figure, steps: Sequence[PlacedStep], t: Translate) -> None:
    for trace in step_traces(steps, t):
        fig.add_trace(trace)


def step_traces(steps: Sequence[PlacedStep], t: Translate) -> list[dict[str, Any]]:
    """A trace for each series of steps, with their intervals as error bars."""
    series = list(dict.fromkeys(step.series for step in steps))
    placed = [[step for step in steps if step.series == name] for name in series]
    return [series_trace(index, name, of, t) for index, (name, of) in enumerate(zip(series, placed, strict=True))]


def series_trace(index: int, series: str, placed: Sequence[PlacedStep], t: Translate) -> dict[str, Any]:
    """Steps of a series as hollow stars with their intervals."""
    costs = [step.cost for step in placed]
    rates, lows, highs = (
        [float(cost.flops / seconds(cost)) for cost in costs]
        for seconds in (lambda c: c.time_s, lambda c: c.high_s, lambda c: c.low_s)
    )
    color, symbol = STEP_COLORS[index % len(STEP_COLORS)], STEP_SYMBOLS[index % len(STEP_SYMBOLS)]
    return {
        "type": "scatter",
        "x": [float(cost.arithmetic_intensity) for cost in costs],
        "y": rates,
        "mode": "markers+text",
        "text": [step.label for step in placed],
        "textposition": "top left",
        "textfont": {"size": 12},
        "name": series,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [high - rate for high, rate in zip(highs, rates, strict=True)],
            "arrayminus": [rate - low for low, rate in zip(lows, rates, strict=True)],
            "thickness": 1.5,
        },
        "marker": {"symbol": f"{symbol}-open", "size": 15, "color": color, "line": {"width": 2.5, "color": color}},
        "hovertext": [
            t(
                "roofline.step_hover",
                step=f"{series} {step.label}",
                time=text.seconds(float(step.cost.time_s)),
                rate=text.flop_rate(rate),
            )
            for step, rate in zip(placed, rates, strict=True)
        ],
        "hoverinfo": "text",
    }


def rate_of(op: OperatorCost) -> float:
    """FLOP/s that an operator reaches."""
    return float(op.operator.flops * op.operator.calls / op.total_s)


def alt_text(steps: Sequence[PlacedStep], t: Translate) -> str:
    """The chart in one sentence, from its data."""
    cost = steps[-1].cost
    bounds = [op.bound for op in cost.operators]
    return t(
        "roofline.alt",
        operators=len(bounds),
        memory=sum(bound.startswith("memory") for bound in bounds),
        compute=bounds.count("compute"),
        overhead=bounds.count("overhead"),
        bound=t(f"bound.{cost.bottleneck}"),
    )
