"""What does each technique do to a token of output, and at what price? A card for each."""

from __future__ import annotations

from collections.abc import Sequence
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


@st.fragment
def technique_cards(
    choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate
) -> None:
    """A card for each technique, by the layer of the engine that it changes; only of the layers that are looked at."""
    st.header(t("techniques.cards"))
    st.caption(t("techniques.cards_caption"))
    tabs = st.tabs([t(f"techniques.section_{section}") for section in SECTIONS], key="layers", on_change="rerun")
    for tab, layers in zip(tabs, SECTIONS.values(), strict=True):
        if tab.open:
            own = {name: effects[name] for name, technique in TECHNIQUES.items() if technique.layer in layers}
            with tab:
                _section(choice, own, measured, t)


def _section(choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate) -> None:
    """Cards of what is possible here, and a line of what is not, with why."""
    names = [name for name, effect in effects.items() if effect.after is not None]
    cards = _cards_a_row(len(names))
    for first in range(0, len(names), cards):
        for name, column in zip(names[first : first + cards], st.columns(cards), strict=False):
            with column, st.container(border=True, height="stretch"):
                _card(choice, name, effects[name], nearest(measured, effects[name].technique, choice.batch), t)
    refused = {name: effect for name, effect in effects.items() if effect.after is None}
    if refused:
        reasons = [f"- **{labelled(one.technique, t)}**{t('sign.colon')}{_reason(one, t)}" for one in refused.values()]
        st.caption("\n".join([t("techniques.refused"), "", *reasons]))


def _cards_a_row(cards: int) -> int:
    """As many as leave the fewest places empty."""
    return min(CARDS_A_ROW, key=lambda wide: (-cards % wide, -wide))


def _card(choice: EngineChoice, name: str, effect: Effect, near: Measured | None, t: Translate) -> None:
    """Two elements, as a page of many is slow to draw: what it is and gains, then what that rests on."""
    technique = effect.technique
    kind, color = ("lossless", "green") if technique.lossless else ("lossy", "orange")
    badges = [
        f":gray-badge[{t(f'techniques.layer_{technique.layer}')}]",
        f":blue-badge[{t(f'techniques.family_{FAMILIES[technique.family]}')}]",
        f":{color}-badge[{t(f'techniques.{kind}')}]",
    ]
    parts = [f"**{labelled(technique, t)}**", " ".join(badges), *_gained(choice, effect, t)]
    st.markdown("\n\n".join(parts))
    lines = [
        about(technique, t),
        _reason(effect, t),
        "" if near is None else t("techniques.measured", gain=near.shown(t)),
        against(name, effect.baseline, t),
        price(technique, t),
        drafting_words(effect, choice.task, t),
    ]
    st.caption("  \n".join(line for line in lines if line))


def _gained(choice: EngineChoice, effect: Effect, t: Translate) -> list[str]:
    """The gain with its verdict, and what a token takes as multiples of what it took before."""
    gain, work = effect.gain(choice.metric), effect.work
    if gain is None or work is None:
        return [t("techniques.makes_fit")]
    verdict = verdict_of(gain, effect.error)
    words = t(f"techniques.verdict_{verdict}")
    head = " | ".join(t(f"techniques.{part}") for part in ("bytes", "flops", "steps"))
    shares = " | ".join(text.gain(share) for share in work)
    return [
        f"{MARKS[verdict]} **{interval(gain, effect.error)}** {t(f'short.{choice.metric}')} · {words}",
        f"| {head} |\n|---|---|---|\n| {shares} |",
    ]


def _reason(effect: Effect, t: Translate) -> str:
    """Why a technique has no gain here."""
    if effect.reason is None:
        return ""
    reason = text.plain(in_words(effect.reason, t))
    return t("techniques.without", reason=reason) if effect.after is not None else reason
