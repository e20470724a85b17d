"""Page Techniques: what does each technique do to a step, what does it gain here, and where does it stop to pay?"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.engine_choice import EngineChoice, effects_of
from membound.app.figures import techniques as figures
from membound.app.figures.comparison import proper, technique_title
from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.app.views import background, fields, linked, states
from membound.app.views.charts import chart
from membound.app.views.choices import short_count
from membound.app.views.engine_choice import choose_engine, conditions, in_short
from membound.app.views.form import form
from membound.app.views.measured import ABOUT, Measured, measured_gains, nearest
from membound.app.views.said import in_words
from membound.app.views.session import translate
from membound.app.views.technique_cards import technique_cards
from membound.app.views.technique_sweep import ask_ahead, experts_read, technique_sweep
from membound.app.views.verdicts import MARKS, drafting_words, interval, labelled, price, verdict_of
from membound.roofline.errors import MemboundError
from membound.roofline.techniques import TECHNIQUES
from membound.simulator.advice.effects import Effect

# What people ask first, and which techniques answer it.
QUESTIONS = {
    "speculation": tuple(name for name, technique in TECHNIQUES.items() if technique.layer == "steps"),
    "weights": ("weight_quantization",),
    "w8a8": ("w8a8",),
    "kv": ("kv_quantization",),
}
# What the page shows below its answer. A control answers sooner where only the part that is looked at is computed,
# sent and drawn.
PARTS = ("gains", "sweep", "cards", "experts")


def page() -> None:
    """Draw the page for the operating point that the widgets, and so the URL, hold."""
    t = translate()
    st.title(t("techniques.title"), anchor="top")
    st.caption(t("techniques.intro"))
    try:
        with form(t) as holds:
            choice = choose_engine(t, formats=True)
            holds(in_short(choice, t))
        effects = _effects(choice)
    except MemboundError as error:
        states.problem(str(error), t("techniques.error_help"))
        return
    if effects is None:
        return
    measured = measured_gains(choice.model_name, choice.device_name)
    _answer(choice, effects, t)
    _part(choice, effects, measured, t)


@st.fragment
def _part(choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate) -> None:
    """The part that is looked at; another one changes no more of the page than this."""
    part = fields.one_of("techniques", "part", PARTS, PARTS[0], t)
    if part == "gains":
        _gains(choice, effects, measured, t)
    elif part == "sweep":
        technique_sweep(choice, measured, t)
    elif part == "cards":
        technique_cards(choice, effects, measured, t)
    else:
        experts_read(choice, t)


def _effects(choice: EngineChoice) -> dict[str, Effect] | None:
    """What each technique does alone; None while that is computed, in as many parts as there are processes for it."""
    parts = background.parts_of(tuple(TECHNIQUES))
    asked = [background.ask((choice.effects_key, part), effects_of, choice, part) for part in parts]
    if linked.seed("part", linked.one_of(PARTS), PARTS[0]) == "sweep":
        ask_ahead(choice)
    found = background.answers(asked, "techniques")
    return None if found is None else {name: part[name] for name in TECHNIQUES for part in found if name in part}


# --- the answer ---


def _answer(choice: EngineChoice, effects: dict[str, Effect], t: Translate) -> None:
    """What helps most in a sentence, then what people ask first."""
    metric = choice.metric
    added = {name: effect for name, effect in effects.items() if not _has(choice, name)}
    gains = {name: gain for name, effect in added.items() if (gain := effect.gain(metric)) is not None}
    if not gains:
        fits = [technique_title(name, t) for name, effect in added.items() if effect.after is not None]
        reasons = [effect.reason for effect in effects.values() if effect.reason]
        listed = t("sign.list").join(fits)
        advice = t("techniques.fits_with", techniques=listed) if fits else t("techniques.fits_with_nothing")
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
        ),
        anchor="answer",
    )
    before = added[best].before
    assert before is not None, "what has a gain has a baseline"
    bound = before.served.bottleneck
    sentences = [
        t(
            "techniques.now",
            time=text.milliseconds(before.served.tpot_s),
            rate=text.rate(before.served.output_tokens_per_s),
            bound=bound_words(bound, t),
            share=text.percent(before.served.shares[bound]),
        )
    ]
    if before.served.batch < choice.batch - 0.5:
        sentences.append(t("techniques.waiting", fits=f"{before.served.batch:.0f}", batch=choice.batch))
    st.write(" ".join(sentences))
    asked = {question: {name: effects[name] for name in names} for question, names in QUESTIONS.items()}
    st.markdown("\n".join(f"- {_question(choice, question, own, t)}" for question, own in asked.items()))


def _question(choice: EngineChoice, question: str, effects: dict[str, Effect], t: Translate) -> str:
    """A question and its answer in one line, by the technique that gains most."""
    format = getattr(next(iter(effects.values())).technique, "format", "")
    words = {"batch": choice.batch, "context": short_count(choice.context), "format": proper(format)}
    asked = t(f"techniques.ask_{question}", **words)
    gains = {name: gain for name, effect in effects.items() if (gain := effect.gain(choice.metric)) is not None}
    if not gains:
        if fits := [technique_title(name, t) for name, effect in effects.items() if effect.after is not None]:
            return f"{asked} {t('techniques.reply_fits', techniques=t('sign.list').join(fits))}"
        reason = next((effect.reason for effect in effects.values() if effect.reason), "")
        return f"{asked} {t('techniques.reply_refused', reason=text.plain(in_words(reason, t)))}"
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
        near = nearest(measured, effect.technique, choice.batch, ABOUT)
        comparable = near is not None and near.row.metric == choice.metric
        rows.append(
            figures.Gain(
                title=f"{labelled(effect.technique, t)}{t('advisor.on') if _has(choice, name) else ''}",
                predicted=gain,
                low=gain / (1 + effect.error),
                high=gain * (1 + effect.error),
                measured=near.row.measured if near is not None and comparable else None,
                spread=near.row.spread if near is not None and comparable else None,
            )
        )
    if not rows:  # the cards say of each why
        technique_cards(choice, effects, measured, t)
        return
    best = max(rows, key=lambda row: row.predicted)
    chart(
        figures.gains_figure(rows, t),
        key="techniques_gains",
        alt=t("techniques.gains_alt", techniques=len(rows), best=best.title, gain=text.gain(best.predicted)),
        caption=t("techniques.gains_caption", conditions=conditions(choice, t)),
        table=_gains_table(choice, effects, measured, t),
    )
    if choice.device_name == "local" and not measured:
        st.caption(t("techniques.not_measured", model=choice.model_name))
        if "pages" in st.session_state:
            live = st.session_state["pages"]["live"]
            st.page_link(live, label=t("techniques.to_live"), icon=":material/play_arrow:")


def _gains_table(
    choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate
) -> pd.DataFrame:
    rows = []
    for effect in effects.values():
        gain, other = (effect.gain(metric) for metric in ("output_tokens_per_s", "tpot_s"))
        work, near = effect.work, nearest(measured, effect.technique, choice.batch)
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
