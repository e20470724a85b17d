"""What does each technique do to a token of output, and at what price? A card for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import streamlit as st

from membound.app import text
from membound.app.engine_choice import EngineChoice
from membound.app.i18n import Translate
from membound.app.views.measured import Measured, nearest
from membound.app.views.verdicts import MARKS, about, against, drafting_words, interval, labelled, price, verdict_of
from membound.roofline.techniques import TECHNIQUES
from membound.roofline.techniques.base import Layer
from membound.simulator.effects import Effect

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


def technique_cards(
    choice: EngineChoice, effects: dict[str, Effect], measured: Sequence[Measured], t: Translate
) -> None:
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
