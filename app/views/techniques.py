"""Page Techniques: what does each technique do to a step, what does it gain here, and where does it stop to pay?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.engine_choice import EngineChoice, effects_of, swept
from membound.app.figures import techniques as figures
from membound.app.figures.comparison import technique_title
from membound.app.figures.template import BOUND_MARKS
from membound.app.i18n import Translate
from membound.app.views import background, linked, states
from membound.app.views.charts import chart
from membound.app.views.choices import one_of, short_count
from membound.app.views.engine_choice import choose_engine, choose_formats, conditions
from membound.app.views.measured import ABOUT, Measured, measured_gains, nearest
from membound.app.views.session import translate
from membound.app.views.verdicts import MARKS, about, against, drafting_words, interval, labelled, price, verdict_of
from membound.roofline.errors import MemboundError
from membound.roofline.operating_point import BATCHES
from membound.roofline.techniques import TECHNIQUES, Speculative
from membound.roofline.techniques.base import Layer
from membound.simulator.effects import Crossing, Effect, crossings, experts_of, share_of_experts

# The layers whose cards share a section.
ENDS: tuple[Layer, ...] = ("weights", "steps")
SECTIONS: dict[str, tuple[Layer, ...]] = {
    "weights": ("weights",),
    "between": tuple(layer for layer in get_args(Layer) if layer not in ENDS),
    "steps": ("steps",),
}
FAMILIES = {
    "move fewer bytes": "fewer_bytes",
    "move less data": "less_data",
    "use a read more than once": "shared_reads",
    "take fewer steps": "fewer_steps",
    "compute less per step": "less_arithmetic",
}
CARDS_A_ROW = (3, 4)
# What people ask first, and which techniques answer it.
QUESTIONS = {
    "speculation": tuple(name for name, technique in TECHNIQUES.items() if technique.layer == "steps"),
    "weights": ("weight_quantization",),
    "w8a8": ("w8a8",),
    "kv": ("kv_quantization",),
}
AXES = ("batch", "ctx")
DRAFTS = ("fixed", "best")
SWEPT = ["eagle", "ngram_speculation", "weight_quantization"]
# What `membound calibrate` measures of weights is 8 bits.
SWEPT_HERE = ["eagle", "ngram_speculation", "int8_weights"]
MOST_SWEPT = len(figures.STYLES)
GUESSES = 4
# A step that reads this share of the experts reads about as much as a dense model.
NEARLY_ALL = 0.9


def page() -> None:
    """Draw the page for the operating point that the widgets, and so the URL, hold."""
    t = translate()
    st.title(t("techniques.title"))
    st.caption(t("techniques.intro"))
    try:
        with st.container(border=True):
            choice = choose_formats(choose_engine(t), t)
        known = background.ask(choice.key, effects_of, choice, tuple(TECHNIQUES))
        effects = background.answer(known, "techniques")
    except MemboundError as error:
        states.problem(str(error), t("techniques.error_help"))
        return
    if effects is None:
        return
    measured = measured_gains(choice.model_name, choice.device_name)
    _answer(choice, effects, t)
    _gains(choice, effects, measured, t)
    _sweep(choice, measured, t)
    _cards(choice, effects, measured, t)
    _experts(choice, t)


# --- the answer ---


def _answer(choice: EngineChoice, effects: dict[str, Effect], t: Translate) -> None:
    """What helps most in a sentence, then what people ask first."""
    metric = choice.metric
    added = {name: effect for name, effect in effects.items() if not _has(choice, name)}
    gains = {name: gain for name, effect in added.items() if (gain := effect.gain(metric)) is not None}
    if not gains:
        fits = [technique_title(name, t) for name, effect in added.items() if effect.after is not None]
        reasons = [effect.reason for effect in effects.values() if effect.reason]
        advice = t("techniques.fits_with", techniques=", ".join(fits)) if fits else t("techniques.fits_with_nothing")
        states.problem(reasons[0] if reasons else "", advice)
        return
    best = max(gains, key=gains.__getitem__)
    verdict = verdict_of(gains[best], added[best].error)
    st.header(
        t(
            f"techniques.answer_{'helps' if verdict == 'helps' else 'none'}",
            batch=choice.batch,
            technique=labelled(added[best].technique, t),
            gain=interval(gains[best], added[best].error),
            metric=t(f"short.{metric}"),
        )
    )
    before = added[best].before
    assert before is not None, "what has a gain has a baseline"
    bound = before.served.bottleneck
    sentences = [
        t(
            "techniques.now",
            time=text.milliseconds(before.served.tpot_s),
            rate=text.rate(before.served.output_tokens_per_s),
            bound=f"{BOUND_MARKS.get(bound, '')} {t(f'bound.{bound}')}",
            share=text.percent(before.served.shares[bound]),
        )
    ]
    if before.served.batch < choice.batch - 0.5:
        sentences.append(t("techniques.waiting", fits=f"{before.served.batch:.0f}", batch=choice.batch))
    st.write(" ".join(sentences))
    for question, names in QUESTIONS.items():
        st.markdown(_question(choice, question, {name: effects[name] for name in names}, t))


def _question(choice: EngineChoice, question: str, effects: dict[str, Effect], t: Translate) -> str:
    """A question and its answer in one line, by the technique that gains most."""
    format = getattr(next(iter(effects.values())).technique, "format", "")
    words = {"batch": choice.batch, "context": short_count(choice.context), "format": format}
    asked = t(f"techniques.ask_{question}", **words)
    gains = {name: gain for name, effect in effects.items() if (gain := effect.gain(choice.metric)) is not None}
    if not gains:
        makes_fit = next((name for name, effect in effects.items() if effect.after is not None), None)
        if makes_fit is not None:
            return f"{asked} {t('techniques.reply_fits', technique=technique_title(makes_fit, t))}"
        reason = next((effect.reason for effect in effects.values() if effect.reason), "")
        return f"{asked} {t('techniques.reply_refused', reason=reason)}"
    best = max(gains, key=gains.__getitem__)
    effect, gain = effects[best], gains[best]
    drafting = effect.after.served.drafting if effect.after is not None else None
    if drafting is not None and drafting["off"]:
        return f"{asked} {MARKS['slower']} {t('techniques.reply_off')}"
    verdict = verdict_of(gain, effect.error)
    reply = t(f"techniques.reply_{verdict}", technique=labelled(effect.technique, t), gain=interval(gain, effect.error))
    drafts = drafting_words(effect, choice.task, t)
    return f"{asked} {MARKS[verdict]} {reply}{f' {drafts}' if drafts else ''}"


def _has(choice: EngineChoice, name: str) -> bool:
    """Whether the engine has the technique already."""
    return name in choice.techniques or TECHNIQUES[name].usual


# --- all gains ---


def _gains(choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate) -> None:
    rows = []
    for name, effect in effects.items():
        gain = effect.gain(choice.metric)
        if gain is None or (_has(choice, name) and gain == 1.0):
            continue
        near = nearest(measured, name, choice.batch, ABOUT)
        comparable = near is not None and near.row.metric == choice.metric
        rows.append(
            figures.Gain(
                title=labelled(effect.technique, t),
                predicted=gain,
                low=gain / (1 + effect.error),
                high=gain * (1 + effect.error),
                measured=near.row.measured if near is not None and comparable else None,
                spread=near.row.spread if near is not None and comparable else None,
                note=t("techniques.has_it") if _has(choice, name) else "",
            )
        )
    if not rows:
        return
    st.header(t("techniques.gains"))
    best = max(rows, key=lambda row: row.predicted)
    chart(
        figures.gains_figure(rows, t),
        key="techniques_gains",
        alt=t("techniques.gains_alt", techniques=len(rows), best=best.title, gain=text.gain(best.predicted)),
        caption=t("techniques.gains_caption", conditions=conditions(choice, t)),
        table=_gains_table(choice, effects, measured, t),
    )


def _gains_table(
    choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate
) -> pd.DataFrame:
    rows = []
    for name, effect in effects.items():
        gain, other = (effect.gain(metric) for metric in ("output_tokens_per_s", "tpot_s"))
        work, near = effect.work, nearest(measured, name, choice.batch)
        rows.append(
            {
                t("column.technique"): labelled(effect.technique, t),
                t("column.baseline"): effect.baseline,
                t("techniques.column_rate"): "–" if gain is None else interval(gain, effect.error),
                t("techniques.column_tpot"): "–" if other is None else interval(other, effect.error),
                t("column.measured"): "–" if near is None else near.shown(t),
                t("techniques.bytes"): "–" if work is None else text.gain(work.bytes),
                t("techniques.flops"): "–" if work is None else text.gain(work.flops),
                t("techniques.steps"): "–" if work is None else text.gain(work.steps),
                t("column.quality"): price(effect.technique, t),
            }
        )
    return pd.DataFrame(rows)


# --- sweeps ---


def _sweep(choice: EngineChoice, measured: Sequence[Measured], t: Translate) -> None:
    st.header(t("techniques.sweep"))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        axis = one_of("over", AXES, AXES[0], t, lambda name: t(f"techniques.over_{name}"))
        drafts = one_of("drafts", DRAFTS, DRAFTS[0], t, lambda name: t(f"techniques.drafts_{name}"))
    names = _swept(choice, t)
    if not names:
        st.info(t("techniques.none_swept"))
        return
    points = choice.over(axis)
    xs = [point.batch if axis == "batch" else point.context for point in points]
    asked = (choice.key, axis, tuple(names), drafts)
    found = background.answer(background.ask(asked, swept, points, names, drafts == "fixed"), "techniques_sweep")
    if found is None:
        return
    curves = {name: _curve(choice, name, xs, [effects[name] for effects in found], t) for name in names}
    drawn = {name: curve for name, curve in curves.items() if curve.xs}
    if axis == "batch":
        drawn = {name: _with_measured(choice, name, curve, measured) for name, curve in drawn.items()}
    for name in names:
        if name not in drawn:
            st.warning(f"{technique_title(name, t)}: {found[0][name].reason}", icon=":material/block:")
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


def _swept(choice: EngineChoice, t: Translate) -> list[str]:
    """Which techniques are drawn over the axis; as many as have a style of their own."""
    usual = SWEPT if choice.device.calibration is None else SWEPT_HERE
    if "sweep" not in st.session_state and "sweep" not in st.query_params:
        st.session_state["sweep"] = list(usual)
    linked.seed_several("sweep", list(TECHNIQUES))
    chosen: list[str] = st.pills(
        t("techniques.swept"),
        list(TECHNIQUES),
        selection_mode="multi",
        key="sweep",
        wrap=True,
        persist_state="session",
        format_func=lambda name: technique_title(name, t),
        help=t("techniques.swept_help", most=MOST_SWEPT),
    )
    linked.keep("sweep", usual)
    if len(chosen) > MOST_SWEPT:
        st.caption(t("techniques.too_many", most=MOST_SWEPT))
    return chosen[:MOST_SWEPT]


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
        size = technique.size
        title = t("techniques.fixed_size", technique=title, depth=size.depth, guesses=size.nodes or size.depth)
    return figures.Curve(
        title,
        tuple(columns[0]),
        tuple(columns[1]),
        tuple(gain / (1 + error) for _, gain, error in found),
        tuple(gain * (1 + error) for _, gain, error in found),
        tuple(crossing.at for crossing in _passes(*columns)),
    )


def _with_measured(
    choice: EngineChoice, name: str, curve: figures.Curve, measured: Sequence[Measured]
) -> figures.Curve:
    """The curve with the newest measurement at each number of users."""
    newest: dict[float, Measured] = {}
    for one in measured:
        if one.row.technique == name and one.row.metric == choice.metric:
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


# --- cards ---


def _cards(choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate) -> None:
    """A card for each technique, by the layer of the engine that it changes."""
    st.header(t("techniques.cards"))
    st.caption(t("techniques.cards_caption"))
    for section, layers in SECTIONS.items():
        names = [name for name, technique in TECHNIQUES.items() if technique.layer in layers]
        st.subheader(t(f"techniques.section_{section}"))
        cards = _cards_a_row(len(names))
        for first in range(0, len(names), cards):
            for name, column in zip(names[first : first + cards], st.columns(cards), strict=False):
                with column, st.container(border=True, height="stretch"):
                    _card(choice, name, effects[name], nearest(measured, name, choice.batch), t)


def _cards_a_row(cards: int) -> int:
    """As many as leave the fewest places empty."""
    return min(CARDS_A_ROW, key=lambda wide: (-cards % wide, -wide))


def _card(choice: EngineChoice, name: str, effect: Effect, near: Measured | None, t: Translate) -> None:
    technique = effect.technique
    st.markdown(f"**{labelled(technique, t)}**")
    with st.container(horizontal=True, gap="small"):
        st.badge(t(f"techniques.layer_{technique.layer}"), color="gray")
        st.badge(t(f"techniques.family_{FAMILIES[technique.family]}"), color="blue")
        kind = "lossless" if technique.lossless else "lossy"
        st.badge(t(f"techniques.{kind}"), color="green" if technique.lossless else "orange")
    st.caption(about(technique, t))
    gain = effect.gain(choice.metric)
    if gain is None:
        possible = effect.after is not None
        st.markdown(t("techniques.makes_fit") if possible else t("techniques.refused"))
        st.caption(t("techniques.without", reason=effect.reason) if possible else effect.reason or "")
    else:
        verdict = verdict_of(gain, effect.error)
        words = t(f"techniques.verdict_{verdict}")
        st.markdown(f"{MARKS[verdict]} **{interval(gain, effect.error)}** {t(f'short.{choice.metric}')} · {words}")
        work = effect.work
        if work is not None:
            head = " | ".join(t(f"techniques.{part}") for part in ("bytes", "flops", "steps"))
            shares = " | ".join(text.gain(share) for share in work)
            st.markdown(f"| {head} |\n|---|---|---|\n| {shares} |")
    lines = [
        against(name, effect.baseline, t),
        price(effect.technique, t),
        drafting_words(effect, choice.task, t),
    ]
    if near is not None:
        lines.insert(0, t("techniques.measured", gain=near.shown(t)))
    st.caption("  \n".join(line for line in lines if line))


# --- mixtures of experts ---


def _experts(choice: EngineChoice, t: Translate) -> None:
    """How soon a batch reads all experts: from then on they are as a dense model's weights."""
    st.header(t("techniques.experts"))
    ffn = experts_of(choice.model)
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
