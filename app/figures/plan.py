"""What does each deployment trade: tokens a second of a user against those of a GPU, cost, and what decides?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from membound.app import text
from membound.app.figures.template import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    figure,
    log_ticks,
    translucent,
)
from membound.app.i18n import Translate

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "hexagon", "pentagon", "star-square", "hourglass")
DASHES = {"given": "solid", "8bit": "dash", "4bit": "dot"}
RESOURCES = ("bandwidth", "compute", "memory", "link")


def front_points(plans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The points of all fronts, in the order of the figure's custom data."""
    return [point for plan in plans for point in plan["front"]]


def front_figure(plans: Sequence[Mapping[str, Any]], slo: Mapping[str, float | None], t: Translate) -> go.Figure:
    """A front for each device and precision; pale points miss the objective, stars are the deployments chosen."""
    fig = figure(460)
    points = front_points(plans)
    numbers = {id(point): index for index, point in enumerate(points)}
    for at, plan in enumerate(plans):
        color, symbol = COLORS[at % len(COLORS)], SYMBOLS[at % len(SYMBOLS)]
        for precision, dash in DASHES.items():
            front = [point for point in plan["front"] if point["deployment"]["precision"] == precision]
            if not front:
                continue
            fig.add_scatter(
                x=[point["tokens_per_s_per_user"] for point in front],
                y=[point["tokens_per_s_per_gpu"] for point in front],
                mode="lines+markers",
                name=f"{plan['device']}{t('sign.comma')}{t(f'plan.precision_{precision}')}",
                line={"color": color, "dash": dash, "width": 1.5},
                marker={
                    "symbol": f"{symbol}-open",
                    "size": 9,
                    "opacity": [1.0 if point["meets_slo"] else 0.3 for point in front],
                    "line": {"width": 2},
                },
                customdata=[numbers[id(point)] for point in front],
                text=[_hover(point, t) for point in front],
                hovertemplate="%{text}<extra></extra>",
            )
        if plan["best"] is not None:
            _star(fig, plan, color, t)
    xs = [point["tokens_per_s_per_user"] for point in points]
    ys = [point["tokens_per_s_per_gpu"] for point in points]
    if slo["tpot_s"] is not None:
        xs.append(1 / slo["tpot_s"])
    spans = [(min(values, default=1.0) / 1.25, max(values, default=10.0) * 1.25) for values in (xs, ys)]
    if slo["tpot_s"] is not None:
        least, most = 1 / slo["tpot_s"], spans[0][1]
        fig.add_vrect(x0=least, x1=most, fillcolor=translucent(GREEN, 0.10), line={"width": 0}, layer="below")
        # on a logarithmic axis a shape has values, an annotation their logarithm
        fig.add_annotation(
            x=math.log10(most), y=1, yref="paper", xanchor="right", yanchor="top", showarrow=False,
            text=t("plan.within_tpot"), font={"size": 12},
        )  # fmt: skip
    for (low, high), axis in zip(spans, (fig.update_xaxes, fig.update_yaxes), strict=True):
        ticks = log_ticks(low, high, (1, 2, 5))
        texts = [f"{tick:,g}" for tick in ticks]
        axis(type="log", tickvals=ticks, ticktext=texts, range=[math.log10(low), math.log10(high)])
    fig.update_xaxes(title=t("plan.x"))
    fig.update_yaxes(title=t("plan.y"))
    return fig


def _star(fig: go.Figure, plan: Mapping[str, Any], color: str, t: Translate) -> None:
    best = plan["best"]
    tpot = best["summary"]["tpot_s"]["p50"] if best["summary"] else best["estimate"]["tpot_s"]
    fig.add_scatter(
        x=[1 / tpot],
        y=[best["output_tokens_per_s"] / best["gpus"]],
        mode="markers+text",
        text=[f"{best['gpus']}×"],
        textposition="middle right",
        name=t("plan.chosen", device=plan["device"]),
        marker={"symbol": "star-open", "size": 17, "color": color, "line": {"width": 2}},
        showlegend=False,
        hovertemplate=f"{best['gpus']} × {best['device']}<extra></extra>",
    )


def _hover(point: Mapping[str, Any], t: Translate) -> str:
    cost = point["cost_usd_per_million_tokens"]
    lines = [
        f"<b>{point['gpus']} × {point['device']}</b>, " + t("plan.batch", batch=text.digits(point["batch"])),
        t(
            "plan.hover",
            user=text.digits(point["tokens_per_s_per_user"]),
            gpu=text.digits(point["tokens_per_s_per_gpu"]),
            ttft=text.seconds(point["ttft_s"]),
        ),
    ]
    if cost is not None:
        lines.append(t("plan.usd_mtok", usd=text.digits(cost)))
    origin = point["origin"]
    if origin["kind"] == "inherited":
        scopes, error = t("sign.list").join(origin["inherited_from"]), text.percent(origin["relative_error"])
        lines.append(t("plan.origin_inherited", device=point["device"], scopes=scopes, error=error))
    return "<br>".join(lines)


def front_alt(plans: Sequence[Mapping[str, Any]], t: Translate) -> str:
    """The fronts in one sentence."""
    points = front_points(plans)
    meeting = [point for point in points if point["meets_slo"]]
    return t(
        "plan.front_alt",
        points=len(points),
        meeting=len(meeting),
        most=text.digits(max((point["tokens_per_s_per_gpu"] for point in meeting), default=0.0)),
    )


def compared_figure(compared: Sequence[Mapping[str, Any]], t: Translate) -> go.Figure:
    """A bar for each device and way to serve, by its price where all have one, else by its devices; the pale end is
    what it takes where all times are as long as their interval allows."""
    priced = all(one["best"]["usd_per_h"] is not None for one in compared)
    devices = list(dict.fromkeys(one["device"] for one in compared))
    fig = figure(130 + 64 * len(devices))
    most = 0.0
    for apart, color, pattern in ((False, BLUE, ""), (True, ORANGE, "/")):
        own = [one for one in compared if one["disaggregated"] == apart]
        if not own:
            continue
        values = [_size(one["best"], priced) for one in own]
        ends = [
            max(value, _size(one["at_upper_end"], priced)) if one["at_upper_end"] else value
            for one, value in zip(own, values, strict=True)
        ]
        most = max(most, *ends)
        fig.add_bar(
            y=[one["device"] for one in own],
            x=values,
            base=0,
            orientation="h",
            name=t("plan.apart" if apart else "plan.together"),
            offsetgroup=str(apart),
            marker={
                "color": translucent(color, 0.3),
                "line": {"color": color, "width": 2},
                "pattern": {"shape": pattern},
            },
            hovertext=[_compared_hover(one, t) for one in own],
            hoverinfo="text",
            textposition="none",
        )
        fig.add_bar(
            y=[one["device"] for one in own],
            x=[end - value for end, value in zip(ends, values, strict=True)],
            base=values,
            orientation="h",
            offsetgroup=str(apart),
            marker={"color": translucent(color, 0.12), "line": {"color": color, "width": 1}},
            text=[_compared_label(one, t) for one in own],
            textposition="outside",
            cliponaxis=False,
            showlegend=False,
            hoverinfo="skip",
        )
    fig.update_yaxes(
        autorange="reversed", showgrid=False, categoryorder="array", categoryarray=devices, automargin=True
    )
    fig.update_xaxes(
        title=t("plan.c_usd_h" if priced else "plan.c_gpus"), range=[0, 1.3 * most], tickprefix="$" if priced else ""
    )
    fig.update_layout(barmode="group", bargap=0.25, bargroupgap=0.1, margin={"l": 8, "t": 48})
    return fig


def _size(place: Mapping[str, Any], priced: bool) -> float:
    return float(place["usd_per_h"] if priced else place["gpus"])


def _compared_label(one: Mapping[str, Any], t: Translate) -> str:
    """`12 GPUs`, or both ends where longer times take more: `12–16 GPUs`."""
    places = [one["best"], one["at_upper_end"] or one["best"]]
    return t("plan.gpus", gpus="–".join(dict.fromkeys(f"{place['gpus']}" for place in places)))


def _compared_hover(one: Mapping[str, Any], t: Translate) -> str:
    best, end = one["best"], one["at_upper_end"]
    lines = [
        f"<b>{best['gpus']} × {best['device']}</b>, " + t("plan.apart" if one["disaggregated"] else "plan.together")
    ]
    if best["summary"]:
        ttft, tpot = (text.milliseconds(best["summary"][name]["p99"]) for name in ("ttft_s", "tpot_s"))
        lines.append(t("plan.p99", ttft=ttft, tpot=tpot))
    if best["upper_end"] is not None:
        lines.append(t("plan.never_at_end") if end is None else t("plan.at_end", gpus=end["gpus"]))
    return "<br>".join(lines)


def compared_alt(compared: Sequence[Mapping[str, Any]], t: Translate) -> str:
    """The bars in one sentence."""
    return t(
        "plan.compared_alt",
        listed=t("sign.semicolon").join(
            f"{one['device']}{t('sign.comma')}{t('plan.apart' if one['disaggregated'] else 'plan.together')}"
            f"{t('sign.colon')}{t('plan.gpus', gpus=one['best']['gpus'])}"
            for one in compared
        ),
    )


def sensitivity_figure(elasticity: Mapping[str, float], t: Translate) -> go.Figure:
    """How far the most that a replica serves moves with each resource."""
    fig = figure(260)
    names = [name for name in RESOURCES if name in elasticity]
    fig.add_bar(
        y=[t(f"plan.resource_{name}") for name in names],
        x=[elasticity[name] for name in names],
        orientation="h",
        marker={"color": translucent(SKY, 0.25), "line": {"color": BLUE, "width": 2}, "pattern": {"shape": "/"}},
        text=[f"{elasticity[name]:+.2f}".replace("-", "−") for name in names],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    fig.add_vline(x=0, line={"color": GREY})
    values = [elasticity[name] for name in names]
    fig.update_xaxes(title=t("plan.elasticity"), range=[min(0.0, *values) - 0.15, max(1.0, *values) + 0.15])
    fig.update_yaxes(autorange="reversed", showgrid=False)
    fig.update_layout(margin={"l": 150, "t": 16})
    return fig
