"""What does each technique do to a token of output, and at what price? A card for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import get_args

import streamlit as st

from membound.app import text
from membound.app.engine_choice import EngineChoice
from membound.app.i18n import Translate
from membound.app.views.measured import Measured, nearest
from membound.app.views.said import in_words
from membound.app.views.verdicts import MARKS, about, against, drafting_words, interval, labelled, price, verdict_of
from membound.roofline.techniques import TECHNIQUES
from membound.roofline.techniques.base import Layer
from membound.simulator.advice.effects import Effect

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
    "wait less": "less_waiting",
}
CARDS_A_ROW = (3, 4)
_BOLD = re.compile(r"\*\*(.+?)\*\*")


@st.fragment
def technique_cards(
    choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate
) -> None:
    """A card for each technique, by the layer of the engine that it changes; only of the layers that are looked at."""
    st.caption(t("techniques.cards_caption"))
    tabs = st.tabs([t(f"techniques.section_{section}") for section in SECTIONS], key="layers", on_change="rerun")
    for tab, layers in zip(tabs, SECTIONS.values(), strict=True):
        if tab.open:
            own = {name: effects[name] for name, technique in TECHNIQUES.items() if technique.layer in layers}
            with tab:
                _section(choice, own, measured, t)


def _section(choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate) -> None:
    """Cards of what is possible here, and a line of what is not, with why: one element, as a page of many is slow."""
    cards = [
        _card(choice, name, effect, nearest(measured, effect.technique, choice.batch), t)
        for name, effect in effects.items()
        if effect.after is not None
    ]
    refused = [
        f"<li><strong>{escape(labelled(one.technique, t))}</strong>{t('sign.colon')}{escape(_reason(one, t))}</li>"
        for one in effects.values()
        if one.after is None
    ]
    wide = min(CARDS_A_ROW, key=lambda wide: (-len(cards) % wide, -wide))  # leaves the fewest places empty
    parts = [f'<div class="membound-cards membound-wide-{wide}">{"".join(cards)}</div>']
    if refused:
        parts.append(
            f'<div class="membound-refused">{_strong(t("techniques.refused"))}<ul>{"".join(refused)}</ul></div>'
        )
    st.html("".join(parts))


def _card(choice: EngineChoice, name: str, effect: Effect, near: Measured | None, t: Translate) -> str:
    """What it is and gains, then what that rests on."""
    technique = effect.technique
    kind = "lossless" if technique.lossless else "lossy"
    badges = {
        "layer": t(f"techniques.layer_{technique.layer}"),
        "family": t(f"techniques.family_{FAMILIES[technique.family]}"),
        kind: t(f"techniques.{kind}"),
    }
    listed = " ".join(f'<span class="membound-{of}">{escape(words)}</span>' for of, words in badges.items())
    lines = [
        about(technique, t),
        _reason(effect, t),
        "" if near is None else t("techniques.measured", gain=near.shown(t)),
        against(name, effect.baseline, t),
        price(technique, t),
        drafting_words(effect, choice.task, t),
    ]
    rests_on = "<br>".join(escape(line) for line in lines if line)
    return (
        f"<article><h3>{escape(labelled(technique, t))}</h3><p>{listed}</p>{_gained(choice, effect, t)}"
        f"<p><small>{rests_on}</small></p></article>"
    )


def _gained(choice: EngineChoice, effect: Effect, t: Translate) -> str:
    """The gain with its verdict, and what a token takes as multiples of what it took before."""
    gain, work = effect.gain(choice.metric), effect.work
    if gain is None or work is None:
        return f"<p>{_strong(t('techniques.makes_fit'))}</p>"
    verdict = verdict_of(gain, effect.error)
    words = escape(f"{t(f'short.{choice.metric}')} · {t(f'techniques.verdict_{verdict}')}")
    head = "".join(f"<th>{escape(t(f'techniques.{part}'))}</th>" for part in ("bytes", "flops", "steps"))
    shares = "".join(f"<td>{text.gain(share)}</td>" for share in work)
    return (
        f"<p>{MARKS[verdict]} <strong>{interval(gain, effect.error)}</strong> {words}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody><tr>{shares}</tr></tbody></table>"
    )


def _reason(effect: Effect, t: Translate) -> str:
    """Why a technique has no gain here."""
    if effect.reason is None:
        return ""
    reason = in_words(effect.reason, t)
    return t("techniques.without", reason=reason) if effect.after is not None else reason


def _strong(words: str) -> str:
    """The catalog's own bold letters as HTML."""
    return _BOLD.sub(r"<strong>\1</strong>", escape(words))
