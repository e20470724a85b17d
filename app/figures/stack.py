"""What do techniques come to together, step by step, and how far is that from multiplying their gains?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from membound.app import text
from membound.app.figures.template import (
    BLUE,
    BOUND_COLORS,
    GREY,
    MEASURED,
    ORANGE,
    PREDICTED,
    VERMILLION,
    bound_words,
    figure,
    translucent,
)
from membound.app.i18n import Translate

ROW_HEIGHT = 44
DRAFTING = "drafting"
COLORS = BOUND_COLORS | {DRAFTING: BLUE}
PATTERNS = {
    "memory_weights": "",
    "memory_kv": "/",
    "compute": "x",
    "link": "-",
    "overhead": ".",
    "idle": "|",
    DRAFTING: "+",
}


@dataclass(frozen=True)
class Level:
    """A row of the waterfall: where it begins and ends, what binds there, the words at its end."""

    title: str
    start: float
    end: float
    bound: str
    words: str


@dataclass(frozen=True)
class Share:
    """A technique in the stack: its gain alone, its share of the whole as a factor (Shapley), and its measured gain
    alone with the spread."""

    title: str
    alone: float | None
    share: float | None
    measured: float | None = None
    spread: float | None = None


def waterfall_figure(
    levels: Sequence[Level],
    product: float | None,
    measured: float | None,
    error: float,
    axis_title: str,
    t: Translate,
) -> go.Figure:
    """From the engine as it is to all techniques, one row each from top to bottom, coloured by what binds after it.

    The last row but one is what multiplying would give, hollow; `measured` stands on the last one.
    """
    titles = [level.title for level in levels]
    rows = [*titles, *([t("stack.multiplied")] if product is not None else [])]
    fig = figure(150 + ROW_HEIGHT * len(rows))
    for bound in dict.fromkeys(level.bound for level in levels):
        held = [level for level in levels if level.bound == bound]
        fig.add_bar(
            y=[level.title for level in held],
            base=[min(level.start, level.end) for level in held],
            x=[abs(level.end - level.start) for level in held],
            orientation="h",
            name=bound_words(bound, t),
            marker={
                # pale, so that the interval is seen on it
                "color": translucent(COLORS[bound], 0.45),
                "line": {"color": COLORS[bound], "width": 1.5},
                "pattern": {"shape": PATTERNS[bound], "solidity": 0.2, "fillmode": "overlay", "fgcolor": COLORS[bound]},
            },
            hovertext=[f"{level.title}: {level.words}" for level in held],
            hoverinfo="text",
        )
    if product is not None:
        fig.add_bar(
            y=[t("stack.multiplied")],
            x=[product],
            orientation="h",
            name=t("stack.multiplied"),
            showlegend=False,
            marker={"color": translucent(GREY, 0.12), "line": {"color": GREY, "width": 2}},
            hovertext=[text.digits(product)],
            hoverinfo="text",
        )
    ends = [level.end for level in levels]
    fig.add_scatter(
        x=ends,
        y=titles,
        mode="markers",
        name=t("predicted"),
        marker={"symbol": "circle-open", "size": 10, "color": GREY, "line": {"width": 2}},
        error_x={
            "type": "data",
            "symmetric": False,
            "thickness": 1.5,
            "width": 5,
            "color": GREY,
            "array": [end * error for end in ends],
            "arrayminus": [end - end / (1 + error) for end in ends],
        },
        hoverinfo="skip",
    )
    if measured is not None:
        fig.add_scatter(
            x=[measured],
            y=[titles[-1]],
            mode="markers",
            name=t("measured"),
            marker={"symbol": "square", "size": 12, "color": MEASURED},
            hovertext=[f"{t('measured')}{t('sign.colon')}{text.digits(measured)}"],
            hoverinfo="text",
        )
    furthest = max([*(end * (1 + error) for end in ends), product or 0.0])
    for row, words in zip(rows, [*(level.words for level in levels), ""], strict=False):
        if words:
            fig.add_annotation(
                x=furthest * 1.02, y=row, text=words, showarrow=False, xanchor="left", align="left", font={"size": 12}
            )
    fig.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=rows, ticks="", automargin=True)
    fig.update_yaxes(showgrid=False)  # it would strike the words through
    fig.update_xaxes(title=axis_title, range=[0, furthest * 1.15], exponentformat="none", tickformat=",")
    fig.update_layout(barmode="overlay", bargap=0.35, margin={"l": 8, "b": 48, "t": 64})
    return fig


def shares_figure(shares: Sequence[Share], t: Translate) -> go.Figure:
    """Each technique's gain alone beside its share of the whole: how much the others take from it, or add."""
    rows = list(reversed(shares))
    fig = figure(120 + ROW_HEIGHT * len(rows))
    fig.add_vline(x=1, line={"color": GREY, "dash": "dash"})
    ends = [1.0]
    for index, row in enumerate(rows):
        if row.alone is not None and row.share is not None:
            fig.add_scatter(
                x=[row.alone, row.share], y=[index, index], mode="lines", line={"color": GREY, "width": 1},
                hoverinfo="skip", showlegend=False,
            )  # fmt: skip
    series = (
        (t("stack.alone"), [row.alone for row in rows], "circle-open", PREDICTED),
        (t("stack.share"), [row.share for row in rows], "diamond-open", ORANGE),
    )
    for name, values, symbol, color in series:
        known = [(value, index) for index, value in enumerate(values) if value is not None]
        ends += [value for value, _ in known]
        fig.add_scatter(
            x=[value for value, _ in known],
            y=[index for _, index in known],
            mode="markers",
            name=name,
            marker={"symbol": symbol, "size": 13, "color": color, "line": {"width": 2.5, "color": color}},
            hovertext=[f"{rows[index].title}, {name}: {text.gain(value)}" for value, index in known],
            hoverinfo="text",
        )
    done = [(row.measured, row.spread or 0.0, index) for index, row in enumerate(rows) if row.measured is not None]
    if done:
        ends += [value for value, _, _ in done]
        fig.add_scatter(
            x=[value for value, _, _ in done],
            y=[index - 0.2 for _, _, index in done],
            mode="markers",
            name=t("stack.alone_measured"),
            marker={"symbol": "square", "size": 10, "color": MEASURED},
            error_x={"type": "data", "thickness": 2, "width": 6, "array": [spread for _, spread, _ in done]},
            hovertext=[f"{rows[index].title}: {text.gain(value)}" for value, _, index in done],
            hoverinfo="text",
        )
    low, high = min(ends) / 1.1, max(ends) * 1.1
    ticks = [tick for tick in (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if low <= tick <= high]
    fig.update_xaxes(
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=[f"{tick:g}×" for tick in ticks],
        title=t("stack.factor"),
    )
    fig.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[row.title for row in rows],
        range=[-0.6, len(rows) - 0.4],
        ticks="",
        automargin=True,
    )
    fig.update_layout(margin={"l": 8, "b": 48, "t": 56})
    return fig


def pairs_figure(titles: Sequence[str], ratios: Sequence[Sequence[float | None]], t: Translate) -> go.Figure:
    """The gain of each two as a share of the product of their gains: below 1 they save the same."""
    fig = figure(150 + ROW_HEIGHT * len(titles))
    shown = [[("–" if value is None else f"{value:.2f}") for value in row] for row in ratios]
    fig.add_heatmap(
        z=[[None if value is None else math.log2(value) for value in row] for row in ratios],
        x=[_in_lines(title) for title in titles],
        y=list(titles),
        text=shown,
        texttemplate="%{text}",
        textfont={"size": 13},
        colorscale=[
            [0.0, translucent(VERMILLION, 0.75)],
            [0.5, translucent(GREY, 0.12)],
            [1.0, translucent(BLUE, 0.75)],
        ],
        zmin=-1.0,
        zmax=1.0,
        showscale=False,
        hovertemplate="%{y} + %{x}: %{text}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    fig.update_yaxes(autorange="reversed", ticks="", showgrid=False, automargin=True)
    fig.update_xaxes(ticks="", showgrid=False, tickangle=0, tickfont={"size": 11}, automargin=True)
    fig.update_layout(margin={"l": 8, "b": 32, "t": 16})
    return fig


def _in_lines(title: str) -> str:
    """A title that fits under its column: a word a line."""
    return title.replace("（", " （").replace(" ", "<br>")
