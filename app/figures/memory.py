"""What fills the device's memory?"""

from __future__ import annotations

import plotly.graph_objects as go

from membound.app import text
from membound.app.figures.template import BOUND_COLORS, GREEN, GREY, PATTERNS, VERMILLION, figure
from membound.app.i18n import Translate
from membound.roofline.memory import MemoryBreakdown

_COLORS = {
    "weights": BOUND_COLORS["memory_weights"],
    "kv": BOUND_COLORS["memory_kv"],
    "activations": GREEN,
    "free": GREY,
}


def memory_parts(memory: MemoryBreakdown, capacity_bytes: float) -> dict[str, float]:
    """Bytes of each part in the order in which they are stacked; what is free may be nothing."""
    return {
        "weights": memory.weights_bytes,
        "kv": memory.kv_bytes,
        "activations": memory.activation_bytes,
        "free": max(0.0, capacity_bytes - memory.total_bytes),
    }


def memory_figure(memory: MemoryBreakdown, capacity_bytes: float, device: str, t: Translate) -> go.Figure:
    """One bar: weights, KV cache, activations, free; a line where the device ends."""
    fig = figure(180)
    for part, value in memory_parts(memory, capacity_bytes).items():
        fig.add_bar(
            y=[device],
            x=[value / text.GIB],
            name=f"{t(f'memory.{part}')} {text.gib(value)}",
            orientation="h",
            marker={
                "color": _COLORS[part],
                "opacity": 0.35 if part == "free" else 1.0,
                "pattern": {"shape": PATTERNS[part], "solidity": 0.25},
            },
            hovertemplate=f"{t(f'memory.{part}')}{t('sign.colon')}{text.gib(value)}<extra></extra>",
        )
    fig.add_vline(x=capacity_bytes / text.GIB, line={"color": VERMILLION, "dash": "dash", "width": 2})
    furthest = max(capacity_bytes, memory.total_bytes)
    fig.update_xaxes(title=t("memory.x"), range=[0, furthest * 1.03 / text.GIB])
    two_a_line = {"entrywidth": 0.48, "entrywidthmode": "fraction", "font": {"size": 11}}
    fig.update_layout(barmode="stack", bargap=0.2, legend={"traceorder": "normal", **two_a_line})
    return fig


def alt_text(memory: MemoryBreakdown, capacity_bytes: float, t: Translate) -> str:
    """The bar in one sentence."""
    parts = memory_parts(memory, capacity_bytes)
    return t(
        "memory.alt", **{part: text.gib(value) for part, value in parts.items()}, capacity=text.gib(capacity_bytes)
    )
