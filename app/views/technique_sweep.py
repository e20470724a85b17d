"""From which batch or context on does a technique pay, and up to which? And when does a batch read all experts?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.engine_choice import EngineChoice, swept
from membound.app.figures import techniques as figures
from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.app.views import background, fields, linked
from membound.app.views.charts import chart
from membound.app.views.engine_choice import conditions
from membound.app.views.measured import Measured
from membound.app.views.said import said
from membound.app.views.verdicts import labelled
from membound.roofline.operating_point import BATCHES
from membound.roofline.techniques import TECHNIQUES, Speculative, Technique
from membound.simulator.advice.effects import Crossing, Effect, crossings, share_of_experts

AXES = ("batch", "ctx")
DRAFTS = ("fixed", "best")
SWEPT = ["eagle", "ngram_speculation", "weight_quantization"]
# What `membound calibrate` measures of weights is 8 bits.
SWEPT_HERE = ["eagle", "ngram_speculation", "int8_weights"]
MOST_SWEPT = len(figures.STYLES)
GUESSES = 4
# A step that reads this share of the experts reads about as much as a dense model.
NEARLY_ALL = 0.9


def technique_sweep(choice: EngineChoice, measured: Sequence[Measured], t: Translate) -> None:
    """The gains over batch or context."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        axis = fields.one_of("choice", "over", AXES, AXES[0], t, lambda name: t(f"techniques.over_{name}"))
        drafts = fields.one_of("choice", "drafts", DRAFTS, DRAFTS[0], t, lambda name: t(f"techniques.drafts_{name}"))
    names = _swept(choice, t)
    if not names:
        st.info(t("techniques.none_swept"))
        return
    points = choice.over(axis)
    xs = [point.batch if axis == "batch" else point.context for point in points]
    parts = background.answers(_asked(choice, axis, drafts, names), "techniques_sweep")
    if parts is None:
        return
    found = background.in_order(parts)
    curves = {name: _curve(choice, name, xs, [effects[name] for effects in found], t) for name in names}
    drawn = {name: curve for name, curve in curves.items() if curve.xs}
    if axis == "batch":
        techniques = {name: found[0][name].technique for name in drawn}
        drawn = {name: _with_measured(choice, techniques[name], curve, measured) for name, curve in drawn.items()}
    for name in names:
        if name not in drawn:
            reason = said(found[0][name].reason or "", t)
            refused = t("stack.refused", technique=technique_title(name, t), reason=reason)
            st.warning(text.plain(refused), icon=":material/block:")
    if not drawn:
        return
    words = [_crossing_words(curve, axis, t) for curve in drawn.values()]
    chosen = choice.batch if axis == "batch" else choice.context
    fixed_at = t("techniques.at_batch", batch=choice.batch)
    if axis == "batch":
        fixed_at = t("techniques.at_context", context=f"{choice.context:,}")
    chart(
        figures.sweep_figure(list(drawn.values()), chosen, t("sweep.x" if axis == "batch" else "choice.ctx"), t),
        key="techniques_sweep",
        alt=" ".join(words),
        caption=t("techniques.sweep_caption", fixed_at=fixed_at, conditions=conditions(choice, t)),
        table=_sweep_table(list(drawn.values()), axis, t),
    )
    st.markdown("\n".join(f"- {line}" for line in words))


def ask_ahead(choice: EngineChoice) -> None:
    """Asks what the sweep will ask, so that it is computed beside what the page asks before it."""
    axis, drafts = (
        linked.seed("over", linked.one_of(AXES), AXES[0]),
        linked.seed("drafts", linked.one_of(DRAFTS), DRAFTS[0]),
    )
    if names := linked.seed("sweep", _drawable, list(_usual(choice))):
        _asked(choice, axis, drafts, names)


def _asked(choice: EngineChoice, axis: str, drafts: str, names: list[str]) -> list[Future[list[dict[str, Effect]]]]:
    asked = (choice.sweep_key(axis), tuple(names), drafts)
    parts = background.parts_of(choice.over(axis))
    return [background.ask((*asked, at), swept, part, names, drafts == "fixed") for at, part in enumerate(parts)]


def _usual(choice: EngineChoice) -> list[str]:
    return SWEPT if choice.device.calibration is None else SWEPT_HERE


def _swept(choice: EngineChoice, t: Translate) -> list[str]:
    """Which techniques are drawn over the axis; as many as have a style of their own.

    A list that shows what is chosen only: a button for each of all techniques is drawn anew with every control of the
    page.
    """
    usual = list(_usual(choice))
    linked.seed("sweep", _drawable, usual)
    chosen: list[str] = st.multiselect(
        t("techniques.swept"),
        list(TECHNIQUES),
        key="sweep",
        persist_state="session",
        max_selections=MOST_SWEPT,
        format_func=lambda name: technique_title(name, t),
        help=t("techniques.swept_help", most=MOST_SWEPT),
    )
    linked.keep("sweep", usual)
    return list(chosen)


def _drawable(held: Any) -> list[str]:
    """Reads techniques, each once and as many as can be drawn at once."""
    return list(dict.fromkeys(linked.some_of(TECHNIQUES)(held) or ()))[:MOST_SWEPT]


def _curve(
    choice: EngineChoice, name: str, xs: Sequence[int], effects: Sequence[Effect], t: Translate
) -> figures.Curve:
    """The gain at every point where there is one."""
    found = [
        (float(x), gain, effect.error)
        for x, effect in zip(xs, effects, strict=True)
        if (gain := effect.gain(choice.metric)) is not None
    ]
    columns = [x for x, _, _ in found], [gain for _, gain, _ in found]
    technique = effects[0].technique
    title = labelled(technique, t)
    if isinstance(technique, Speculative) and not technique.is_open:
        depth, guesses = technique.size.depth, technique.size.nodes or technique.size.depth
        words = "stack.drafts" if guesses == depth else "techniques.fixed_size"
        title = t(words, technique=title, depth=depth, guesses=guesses)
    return figures.Curve(
        title,
        tuple(columns[0]),
        tuple(columns[1]),
        tuple(gain / (1 + error) for _, gain, error in found),
        tuple(gain * (1 + error) for _, gain, error in found),
        tuple(crossing.at for crossing in _passes(*columns)),
    )


def _with_measured(
    choice: EngineChoice, technique: Technique, curve: figures.Curve, measured: Sequence[Measured]
) -> figures.Curve:
    """The curve with the newest measurement at each number of users."""
    newest: dict[float, Measured] = {}
    for one in measured:
        if one.is_of(technique) and one.row.metric == choice.metric:
            newest.setdefault(one.users, one)
    points = ((users, one.row.measured or 0.0, one.row.spread or 0.0) for users, one in sorted(newest.items()))
    return figures.Curve(curve.title, curve.xs, curve.gains, curve.low, curve.high, curve.crossings, tuple(points))


def _passes(xs: Sequence[float], gains: Sequence[float]) -> list[Crossing]:
    """Where gains pass 1, straight between points as they are drawn, on two logarithmic axes."""
    return crossings(xs, [math.log(gain) for gain in gains], 0.0)


def _crossing_words(curve: figures.Curve, axis: str, t: Translate) -> str:
    """Where the curve passes 1, with the points at which its interval does."""
    found = _passes(curve.xs, curve.gains)
    words = {"technique": curve.title, "axis": t(f"techniques.axis_{axis}")}
    if not found:
        best = max(curve.gains)
        kind = "always" if curve.gains[0] > 1 else "never"
        return t(f"techniques.pays_{kind}", gain=text.gain(best), last=f"{curve.xs[-1]:,.0f}", **words)
    first = found[0]
    bounds = [_passes(curve.xs, ys) for ys in (curve.low, curve.high)]
    inner, outer = (next((c.at for c in each if c.rises == first.rises), None) for each in bounds)
    low, high = (inner, outer) if not first.rises else (outer, inner)
    interval_words = t(
        "techniques.crossing_interval",
        low=f"{low:,.0f}" if low else f"{curve.xs[0]:,.0f}",
        high=f"{high:,.0f}" if high else f"{curve.xs[-1]:,.0f}",
    )
    kind = "from" if first.rises else "until"
    return f"{t(f'techniques.pays_{kind}', at=f'{first.at:,.0f}', **words)} {interval_words}"


def _sweep_table(curves: Sequence[figures.Curve], axis: str, t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("column.technique"): curve.title,
            t(f"techniques.axis_{axis}"): int(x),
            t("techniques.gain_axis"): round(gain, 3),
            t("techniques.low"): round(low, 3),
            t("techniques.high"): round(high, 3),
        }
        for curve in curves
        for x, gain, low, high in zip(curve.xs, curve.gains, curve.low, curve.high, strict=True)
    )


# --- mixtures of experts ---


def experts_read(choice: EngineChoice, t: Translate) -> None:
    """How soon a batch reads all experts: from then on they are as a dense model's weights."""
    ffn = next(iter(choice.model.mixtures), None)
    if ffn is None:
        st.caption(t("techniques.no_experts", model=choice.model_name))
        return
    plain = [share_of_experts(ffn, batch) for batch in BATCHES]
    verify = [share_of_experts(ffn, batch * (1 + GUESSES)) for batch in BATCHES]
    now = share_of_experts(ffn, choice.batch)
    full = crossings(BATCHES, plain, NEARLY_ALL)
    words = {"experts": ffn.experts, "chosen": ffn.top_k, "batch": choice.batch, "model": choice.model_name}
    sentences = [t("techniques.experts_answer", share=text.percent(now), **words)]
    if full:
        sentences.append(t("techniques.experts_full", share=text.percent(NEARLY_ALL), at=f"{full[0].at:,.0f}"))
    st.markdown(" ".join(sentences))
    series = [
        (t("techniques.experts_plain"), plain),
        (t("techniques.experts_verify", guesses=GUESSES), verify),
    ]
    chart(
        figures.experts_figure(BATCHES, series, choice.batch, full[0].at if full else None, NEARLY_ALL, t),
        key="techniques_experts",
        alt=" ".join(sentences),
        caption=t("techniques.experts_caption", **words),
        table=pd.DataFrame(
            {t("column.batch"): list(BATCHES)} | {name: [text.percent(s) for s in shares] for name, shares in series}
        ),
    )
