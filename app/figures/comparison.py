"""Does measurement agree with prediction? Pairs of both for each technique and operating point."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from membound.app import text
from membound.app.figures.template import GREY, MEASURED, PREDICTED, TEMPLATE
from membound.app.i18n import Translate
from membound.roofline.results.comparison import Comparison
from membound.roofline.techniques import TECHNIQUES

# More pairs do not fit side by side: they lie below each other then.
MOST_UPRIGHT = 6
ROW_PX = 30
# A longer title goes on in a second line: on a phone it would leave no place for the pairs.
TITLE_CHARACTERS = 40


# What a draft's acceptance is made of, and its sizes.
_ACCEPTANCE = ("alpha", "decay", "guessable", "rank_exponent", "hit_rate")
_SIZES = "gamma|depth|heads|tree_size|layers|budget"
_SIZED = re.compile(rf"({_SIZES}) (\d+)")
# What stands together in the name of a variant.
_PARTS = re.compile(rf"(?:{_SIZES}) \d+|\S+ activations|lm_head \S+|\S+")
_METHODS = {
    name.lower(): name
    for name in ("GPTQ", "AWQ", "RTN", "SmoothQuant", "SparseGPT", "Wanda", "SnapKV", "H2O", "Quest", "StreamingLLM")
} | {"streaming": "StreamingLLM"}


def technique_title(name: str, t: Translate) -> str:
    """The technique as people call it; in Chinese with the English name in brackets.

    Of a stack all of them, and what a technique was given behind its title.
    """
    if name == "baseline":
        return t("comparison.baseline")
    return " + ".join(_titled(part, t) for part in name.split(" + "))


def _titled(part: str, t: Translate) -> str:
    name, _, given = part.partition(" ")
    if name not in TECHNIQUES:
        return t.name(f"technique.{part}", part)
    title = t.name(f"technique.{name}", TECHNIQUES[name].title)
    words = _given(given, t)
    return f"{title} {words}" if words else title


def _given(given: str, t: Translate) -> str:
    """What a technique was given, without how often its guesses are right, which a run's scenario says."""
    for field in _ACCEPTANCE:
        given = re.sub(rf"\b{field} \S+ ?", "", given)
    return t("sign.comma").join(_part(part, t) for part in _PARTS.findall(given))


def _part(part: str, t: Translate) -> str:
    if sized := _SIZED.fullmatch(part):
        return t(f"given.{sized[1]}", value=sized[2])
    if part.endswith(" activations"):
        return t("given.activations", value=part.removesuffix(" activations"))
    return proper(part)


def proper(word: str) -> str:
    """A method as those write it who made it."""
    return _METHODS.get(word, word)


def point_label(point: Mapping[str, object], t: Translate) -> str:
    """A point of the sweep: its users where it is a closed loop, else its fields without their paths."""
    if "workload.arrivals.concurrency" in point:
        return t("point.users", users=point["workload.arrivals.concurrency"])
    return t("sign.list").join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in point.items()) or t("point.only")


def metric_title(metric: str, statistic: str | None, t: Translate) -> str:
    """A metric with the statistic of its distribution, where it is one of a distribution."""
    words = t(f"metric.{metric}")
    return words if statistic is None else f"{words}{t('sign.comma')}{t(f'statistic.{statistic}')}"


def by_point(rows: Sequence[Comparison], t: Translate) -> dict[str, list[Comparison]]:
    """Rows by the label of their point, in the order in which the points came."""
    groups: dict[str, list[Comparison]] = {}
    for row in rows:
        groups.setdefault(point_label(row.point, t), []).append(row)
    return groups


def gains_figure(rows: Sequence[Comparison], t: Translate) -> go.Figure:
    """One panel a point, a pair a technique: hollow with a dotted bar is predicted, solid with a bar is measured."""
    groups = by_point([row for row in rows if row.technique != "baseline"], t)
    fig = make_subplots(
        rows=1, cols=max(1, len(groups)), shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=list(groups)
    )
    if max(map(len, groups.values()), default=0) > MOST_UPRIGHT:
        return _lying(fig, groups, rows, t)
    fig.update_layout(template=TEMPLATE, height=400, margin={"t": 84, "b": 72}, legend={"y": 1.12})
    for column, group in enumerate(groups.values(), start=1):
        names = [_in_lines(technique_title(row.technique, t)) for row in group]
        _pair(fig, column, list(range(len(group))), group, 1.0, t)
        ticks = list(range(len(group)))
        fig.update_xaxes(
            tickvals=ticks,
            ticktext=names,
            tickangle=0,
            tickfont={"size": 11},
            range=[-0.6, len(group) - 0.4],
            col=column,
        )
        fig.add_hline(y=1, line={"color": GREY, "dash": "dash"}, row=1, col=column)
    fig.update_yaxes(title=t("comparison.gain_y"), col=1)
    fig.update_yaxes(range=[0, _highest(rows) * 1.15], ticksuffix="×")
    return fig


def _lying(
    fig: go.Figure, groups: Mapping[str, list[Comparison]], rows: Sequence[Comparison], t: Translate
) -> go.Figure:
    """The pairs of many techniques below each other, the first on top; each has its place in every panel."""
    names = list(dict.fromkeys(row.technique for group in groups.values() for row in group))
    places = {name: len(names) - 1 - index for index, name in enumerate(names)}
    height = 150 + ROW_PX * len(names)
    fig.update_layout(template=TEMPLATE, height=height, margin={"t": 84, "b": 60}, legend={"y": 1 + 50 / height})
    for column, group in enumerate(groups.values(), start=1):
        _pair(fig, column, [places[row.technique] for row in group], group, 1.0, t, lying=True)
        fig.add_vline(x=1, line={"color": GREY, "dash": "dash"}, row=1, col=column)
        fig.update_xaxes(range=[0, _highest(rows) * 1.05], ticksuffix="×", nticks=4, tickangle=0, col=column)
    fig.add_annotation(text=t("comparison.gain_y"), x=0.5, y=0, xref="paper", yref="paper", yshift=-52, showarrow=False)
    titles = [technique_title(name, t) for name in names]
    fig.update_yaxes(
        tickvals=list(places.values()),
        ticktext=[_in_two_lines(title) for title in titles],
        tickfont={"size": 11},
        range=[-0.6, len(names) - 0.4],
        automargin=True,
    )
    return fig


def _in_two_lines(title: str) -> str:
    """A long title in two lines of about the same length."""
    half = -(-len(title) // 2) + 6
    return title if len(title) <= TITLE_CHARACTERS else "<br>".join(textwrap.wrap(title, half))


def _in_lines(title: str) -> str:
    """A title that fits under its pair: a word a line."""
    return title.replace("（", " （").replace(" ", "<br>")


def baseline_figure(rows: Sequence[Comparison], t: Translate) -> go.Figure:
    """The baseline's time per output token at each point."""
    baselines = [row for row in rows if row.technique == "baseline"]
    fig = make_subplots(rows=1, cols=1)
    fig.update_layout(template=TEMPLATE, height=400, margin={"t": 84, "b": 72}, legend={"y": 1.12})
    _pair(fig, 1, list(range(len(baselines))), baselines, 1e3, t)
    fig.update_xaxes(
        tickvals=list(range(len(baselines))),
        ticktext=[point_label(row.point, t) for row in baselines],
        range=[-0.6, len(baselines) - 0.4],
    )
    fig.update_yaxes(title=t("comparison.tpot_y"), rangemode="tozero")
    return fig


def alt_text(rows: Sequence[Comparison], t: Translate) -> str:
    """The chart in one sentence."""
    gains = [row for row in rows if row.technique != "baseline"]
    measured = [row for row in gains if row.measured is not None]
    within = sum(row.low <= row.measured <= row.high for row in measured if row.measured is not None)
    return t("comparison.alt", gains=len(gains), measured=len(measured), within=within)


def _pair(
    fig: go.Figure, column: int, at: list[int], rows: list[Comparison], scale: float, t: Translate, lying: bool = False
) -> None:
    """A pair for each row at its place; `lying` pairs have their values along x."""

    def placed(places: list[float], values: list[float], error: dict[str, Any]) -> dict[str, Any]:
        if lying:
            return {"x": values, "y": places, "error_x": error}
        return {"x": places, "y": values, "error_y": error}

    side = -0.12 if lying else 0.12  # predicted comes first: on the left, or on top
    predicted = [row.predicted * scale for row in rows]
    interval = {
        "type": "data",
        "symmetric": False,
        "thickness": 6,
        "width": 0,
        "color": "rgba(86,180,233,0.35)",
        "array": [row.high * scale - value for row, value in zip(rows, predicted, strict=True)],
        "arrayminus": [value - row.low * scale for row, value in zip(rows, predicted, strict=True)],
    }
    fig.add_scatter(
        **placed([place - side for place in at], predicted, interval),
        mode="markers",
        name=t("predicted"),
        showlegend=column == 1,
        legendgroup="predicted",
        marker={"symbol": "circle-open", "size": 13, "color": PREDICTED, "line": {"width": 2.5, "color": PREDICTED}},
        hovertext=[f"{t('predicted')}{t('sign.colon')}{_value(row, row.predicted)}" for row in rows],
        hoverinfo="text",
        row=1,
        col=column,
    )
    done = [(place, row, row.measured) for place, row in zip(at, rows, strict=True) if row.measured is not None]
    spreads = {"type": "data", "thickness": 2, "width": 7, "array": [(row.spread or 0) * scale for _, row, _ in done]}
    fig.add_scatter(
        **placed([place + side for place, _, _ in done], [value * scale for _, _, value in done], spreads),
        mode="markers",
        name=t("measured"),
        showlegend=column == 1,
        legendgroup="measured",
        marker={"symbol": "square", "size": 11, "color": MEASURED},
        hovertext=[f"{t('measured')}{t('sign.colon')}{_value(row, value)}" for _, row, value in done],
        hoverinfo="text",
        row=1,
        col=column,
    )


def _value(row: Comparison, value: float) -> str:
    return text.milliseconds(value) if row.technique == "baseline" else text.gain(value)


def _highest(rows: Sequence[Comparison]) -> float:
    gains = [max(row.high, (row.measured or 0) + (row.spread or 0)) for row in rows if row.technique != "baseline"]
    return max(gains, default=2.0)
