"""Page Explore: what binds a step of any model on any device, and what would bind next?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import plotly.graph_objects as go
import streamlit as st

from membound.app import text
from membound.app.configurations import Configuration
from membound.app.figures import memory, moving_roofline, roofline, sweep
from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.app.views import choices, pins, states, tables
from membound.app.views.charts import chart, share_bars, words_table
from membound.app.views.said import said
from membound.app.views.session import device_name, translate
from membound.roofline.errors import MemboundError
from membound.roofline.operating_point import OperatingPoint, SweepPoint
from membound.roofline.techniques import EngineSetup


def page() -> None:
    """Draw the page for the operating point that the widgets, and so the URL, hold."""
    t = translate()
    st.title(t("explore.title"), anchor="top")
    st.caption(t("explore.intro"))
    try:
        present = choices.configuration()
        point = present.point()
        compared = pins.rows(present, point, t)
        # All figures before the first word: what reaches the browser at once is laid out once.
        moving = _moving_figure(point, pins.placed(compared, t), t)
        filled, points = _memory_figure(point, t), point.sweep()
        times, rates = sweep.time_figure(points, point.batch, t), sweep.rate_figure(points, point.batch, t)
        _answer(point, t)
        _fit(point, t)
        _compared(present, compared, t)
        left, right = st.columns([3, 2], gap="large")
        with left:
            _roofline(point, moving, t)
        with right:
            _shares(point, t)
            _memory(point, filled, t)
        _sweep(point, points, times, rates, t)
    except MemboundError as error:
        states.problem(str(error), t("explore.error_help"))


def _answer(point: OperatingPoint, t: Translate) -> None:
    cost = point.cost
    (bound, share), *others = point.bounds()
    st.header(
        t(
            "explore.answer",
            phase=t(f"phase.{point.phase}"),
            time=text.seconds(float(cost.time_s)),
            low=text.seconds(float(cost.low_s)),
            high=text.seconds(float(cost.high_s)),
            bound=bound_words(bound, t),
            share=text.percent(share),
        ),
        anchor="answer",
    )
    sentences = [_origin(point, t)]
    if others:
        second = {"bound": t(f"bound.{others[0][0]}"), "share": text.percent(others[0][1])}
        sentences.append(t("explore.second", first=t(f"bound.{bound}"), **second))
    if change := point.next_bound():
        sentences.append(t("explore.next", batch=change[0], bound=t(f"bound.{change[1]}")))
    if point.phase == "verify":
        tokens = f"{point.breakeven_tokens():.2f}"
        sentences.append(t("explore.breakeven", tokens=tokens, most=point.most_tokens))
    st.write(" ".join(sentences))
    st.caption(t("explore.formats", words=said(point.formats.words, t)))
    numbers = st.columns(4)
    numbers[0].metric(t("metric.step"), text.seconds(float(cost.time_s)), help=t("help.step"))
    numbers[1].metric(t("metric.rate"), text.rate(point.tokens_per_s), help=t("help.rate"))
    ridge = point.ridge
    numbers[2].metric(
        t("metric.intensity"),
        f"{text.digits(ridge.intensity)} FLOP/byte",
        help=t("help.intensity", ridge=text.digits(ridge.flops_per_byte), dtype=ridge.dtype),
    )
    numbers[3].metric(t("metric.moved"), text.moved(float(cost.bytes)), help=t("help.moved"))


def _origin(point: OperatingPoint, t: Translate) -> str:
    """Plainly, whether the device was measured, and whose times it has where it was not."""
    device, origin = device_name(point.hardware, t), point.origin
    if origin.kind == "calibrated":
        return t("explore.calibrated", device=device)
    if origin.kind == "measured":
        return t("explore.measured", device=device)
    words = {"any": t("scope.any"), point.hardware.name: t("scope.formats")}
    scopes = [words.get(scope) or t("scope.devices", scope=scope) for scope in origin.inherited_from]
    share = text.percent(origin.measured_share)
    return t(f"explore.{origin.kind}", device=device, share=share, scopes=t("sign.list").join(scopes))


def _compared(present: Configuration, compared: Sequence[pins.Row], t: Translate) -> None:
    """The buttons that pin, and once something is pinned all configurations side by side."""
    pins.controls(present, compared, t)
    if len(compared) > 1:
        words_table(pins.table(compared, t))
        st.caption(t("pins.caption"))


def _fit(point: OperatingPoint, t: Translate) -> None:
    if not point.fits:
        need, have = text.gib(point.memory.total_bytes), text.gib(point.usable_bytes)
        whole = text.gib(float(point.hardware.memory_bytes))
        st.error(
            t(
                "explore.no_fit",
                model=point.model.name,
                device=device_name(point.hardware, t),
                need=need,
                have=have,
                whole=whole,
            ),
            icon=":material/error:",
        )


def _moving_figure(point: OperatingPoint, pinned: Sequence[moving_roofline.Pinned], t: Translate) -> go.Figure:
    places = [moving_roofline.Place(other.batch, tuple(_steps(other, t))) for other in point.at_batches]
    return moving_roofline.moving_figure(roofline.roofs_of(point.hardware), places, point.batch, t, pinned=pinned)


def _roofline(point: OperatingPoint, figure: go.Figure, t: Translate) -> None:
    st.header(t("explore.roofline"), anchor="roofline")
    chart(
        figure,
        key="roofline",
        alt=roofline.alt_text(_steps(point, t), t),
        caption=t("roofline.caption", source=point.hardware.source),
        table=tables.operator_table(point, t),
    )


def _steps(point: OperatingPoint, t: Translate) -> list[roofline.PlacedStep]:
    """The step, and before it the one of the plain engine where this one differs."""
    steps = [roofline.PlacedStep(t("explore.this_step"), "", point.cost)]
    plain_setup = EngineSetup(precision=point.model.published, parallel=point.setup.parallel)
    if point.setup != plain_setup:
        plain = replace(point, setup=plain_setup)
        steps.insert(0, roofline.PlacedStep(t("explore.plain_step"), "", plain.cost))
    return steps


def _shares(point: OperatingPoint, t: Translate) -> None:
    st.header(t("explore.binds"), anchor="binds")
    share_bars(point.bounds(), t)


def _memory_figure(point: OperatingPoint, t: Translate) -> go.Figure:
    return memory.memory_figure(point.memory, point.usable_bytes, device_name(point.hardware, t), t)


def _memory(point: OperatingPoint, figure: go.Figure, t: Translate) -> None:
    st.header(t("explore.memory"), anchor="memory")
    capacity, whole = point.usable_bytes, float(point.hardware.memory_bytes)
    chart(
        figure,
        key="memory",
        alt=memory.alt_text(point.memory, capacity, t),
        caption=t(
            "memory.caption",
            total=text.gib(point.memory.total_bytes),
            capacity=text.gib(capacity),
            whole=text.gib(whole),
        ),
        table=tables.memory_table(point, t),
    )
    if point.fits:
        st.caption(t("explore.still_fits", batch=f"{point.largest_batch():,}", context=f"{point.largest_context():,}"))


def _sweep(
    point: OperatingPoint, points: Sequence[SweepPoint], times: go.Figure, rates: go.Figure, t: Translate
) -> None:
    st.header(t("explore.sweep"), anchor="sweep")
    alt = sweep.alt_text(points, t)
    left, right = st.columns(2, gap="large")
    with left:
        table = tables.sweep_table(points, t)
        chart(times, key="sweep", alt=alt, table=table)
    with right:
        chart(rates, key="sweep_rate", alt=alt, table=table)
    st.caption(t("sweep.caption", phase=t(f"phase.{point.phase}"), context=point.context))
