"""How many times the other's number is each number of a run?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from membound.app import text
from membound.app.figures.comparison import metric_title, point_label, technique_title
from membound.app.figures.template import BLUE, GREEN, GREY, VERMILLION, figure
from membound.app.i18n import Translate
from membound.app.two_runs import BASELINE, Key, Pair, Value

ROOM = 1.15
TICKS = (*(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85), *(1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0))
MARKS = {"better": "▲", "worse": "▼", "same": "＝", "other": "·"}
LOOKS = {
    "better": (GREEN, "triangle-up"),
    "worse": (VERMILLION, "triangle-down"),
    "same": (GREY, "circle"),
    "other": (BLUE, "square"),
}
ROW_PX, LEAST_PX, MOST_ROWS = 26, 220, 40


def named(key: Key, t: Translate) -> str:
    """What a number is of."""
    if key.technique != BASELINE:
        words = t("two.gain", technique=technique_title(key.technique, t), metric=t(f"short.{key.metric}"))
    else:
        words = metric_title(key.metric, key.statistic, t)
    return f"{words} · {point_label(dict(key.point), t)}" if key.point else words


def shown(value: Value | None, t: Translate) -> str:
    """A number with its unit, its spread, and whether it is only predicted."""
    if value is None:
        return "–"
    spread = "" if value.spread is None else f" ± {_number(value.spread, value.unit)}"
    predicted = "" if value.measured else f" ({t('two.predicted')})"
    return f"{_number(value.number, value.unit)}{spread}{predicted}"


def _number(number: float, unit: str) -> str:
    if unit == "s":
        return text.seconds(number)
    if unit == "share":
        return text.percent(number)
    if unit == "ratio":
        return text.gain(number)
    return text.rate(number) if unit == "tokens/s" else f"{text.digits(number)}/s"


def ratio_figure(pairs: Sequence[Pair], t: Translate) -> go.Figure:
    """A mark for each number that both have and neither has as 0, at the ratio of B to A; the same lies at 1."""
    both = [pair for pair in pairs if pair.ratio is not None and pair.ratio > 0][:MOST_ROWS]
    fig = figure(max(LEAST_PX, 110 + ROW_PX * len(both)))
    names = [named(pair.key, t) for pair in both]
    for verdict, (color, symbol) in LOOKS.items():
        held = [(place, pair) for place, pair in enumerate(both) if pair.verdict == verdict]
        if not held:
            continue
        fig.add_scatter(
            x=[pair.ratio for _, pair in held],
            y=[len(both) - 1 - place for place, _ in held],
            error_x={"type": "data", "array": [pair.spread for _, pair in held], "thickness": 1.5},
            mode="markers",
            name=f"{MARKS[verdict]} {t(f'two.{verdict}')}",
            marker={"color": color, "symbol": symbol, "size": 12},
            hovertext=[f"{names[place]}: {pair.ratio:.3g}×" for place, pair in held],
            hoverinfo="text",
        )
    fig.add_vline(x=1, line={"color": GREY, "dash": "dash"})
    ends = [1.0, *(end for pair in both for end in _ends(pair))]
    # Twice and half are as far from the same; beyond the last mark there is room for its width.
    low, high = min(ends) / ROOM, max(ends) * ROOM
    ticks = [tick for tick in TICKS if low <= tick <= high]
    fig.update_xaxes(
        title=t("two.x"),
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=[f"{tick:g}×" for tick in ticks],
    )
    fig.update_yaxes(
        tickvals=list(range(len(both) - 1, -1, -1)),
        ticktext=names,
        tickfont={"size": 11},
        range=[-0.6, len(both) - 0.4],
        automargin=True,
    )
    return fig


def _ends(pair: Pair) -> tuple[float, float]:
    """From where to where a pair's mark goes; a bar that reaches 0 has no end on a logarithmic axis."""
    assert pair.ratio is not None
    low = pair.ratio - pair.spread
    return (low if low > 0 else pair.ratio, pair.ratio + pair.spread)


def alt_text(pairs: Sequence[Pair], t: Translate) -> str:
    """The chart in one sentence."""
    counted = [pair.verdict for pair in pairs if pair.ratio is not None]
    return t("two.alt", numbers=len(counted), better=counted.count("better"), worse=counted.count("worse"))
