"""What do all figures share? Colours that colour-blind readers can tell apart, a symbol for each bound, one layout.

Predicted is hollow or dashed with a band, measured is solid with error bars, everywhere. The background and the text
follow the page's theme, so the colours here are legible on white and on black.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from membound.app.i18n import Translate

# Okabe and Ito, Color Universal Design, 2008; their yellow and black are left out (invisible on one of the themes).
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
VERMILLION, SKY, PURPLE = "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#8C8C8C"

PREDICTED, MEASURED = SKY, VERMILLION
BOUND_COLORS = {
    "memory_weights": SKY,
    "memory_kv": PURPLE,
    "compute": VERMILLION,
    "link": GREEN,
    "overhead": ORANGE,
    "idle": GREY,
}
BOUND_SYMBOLS = {
    "memory_weights": "circle",
    "memory_kv": "hexagon",
    "compute": "triangle-up",
    "link": "square",
    "overhead": "diamond",
    "idle": "x",
}
# the same symbols in text, for tables and sentences
BOUND_MARKS = {
    "memory_weights": "●",
    "memory_kv": "⬢",
    "compute": "▲",
    "link": "■",
    "overhead": "◆",
    "idle": "✕",
    "drafting": "✎",
}
PATTERNS = {"weights": "", "kv": "/", "activations": "x", "free": "."}

TEMPLATE = go.layout.Template(
    layout=go.Layout(
        font={"size": 13},
        colorway=[BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY],
        margin={"l": 64, "r": 28, "t": 40, "b": 56},
        hovermode="closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "title": {"text": ""}},
        xaxis={"showgrid": True, "zeroline": False, "ticks": "outside", "separatethousands": True},
        yaxis={
            "showgrid": True,
            "zeroline": False,
            "ticks": "outside",
            "separatethousands": True,
            "ticklabelstandoff": 4,
            "title": {"standoff": 10},
        },
    )
)


def bound_words(bound: str, t: Translate) -> str:
    """What binds, with its symbol."""
    return f"{BOUND_MARKS[bound]} {t(f'bound.{bound}')}"


def figure(height: int) -> go.Figure:
    """An empty figure of the one template."""
    fig = go.Figure()
    fig.update_layout(template=TEMPLATE, height=height)
    return fig


def translucent(color: str, alpha: float) -> str:
    """`#RRGGBB` as a fill through which the grid shows."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def band(
    fig: go.Figure, x: Sequence[float], y: Sequence[float], color: str, alpha: float, *, legendgroup: str | None = None
) -> None:
    """The inside of a closed line, which no legend names: an interval around a curve."""
    fig.add_scatter(
        x=x,
        y=y,
        fill="toself",
        fillcolor=translucent(color, alpha),
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        legendgroup=legendgroup,
    )


def log_ticks(low: float, high: float, mantissas: tuple[int, ...] = (1,)) -> list[float]:
    """The powers of ten, times each of the mantissas, between two positive values."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [mantissa * 10.0**exponent for exponent in exponents for mantissa in mantissas]
    return [tick for tick in ticks if low <= tick <= high]
