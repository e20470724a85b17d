"""Does a predicted gain help, as far as its interval says?"""

from __future__ import annotations

from typing import Literal

from membound.app import text
from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.roofline.techniques import Technique
from membound.simulator.effects import Effect

Verdict = Literal["helps", "may_help", "same", "may_slow", "slower"]
MARKS: dict[Verdict, str] = {"helps": "▲", "may_help": "△", "same": "＝", "may_slow": "▽", "slower": "▼"}
# A difference below this is none, whatever the interval.
NOTHING = 0.005


def verdict_of(gain: float, error: float) -> Verdict:
    """What a gain means whose interval reaches from gain / (1 + error) to gain x (1 + error)."""
    if abs(gain - 1) < NOTHING:
        return "same"
    if gain > 1:
        return "helps" if gain / (1 + error) > 1 else "may_help"
    return "slower" if gain * (1 + error) < 1 else "may_slow"


def interval(gain: float, error: float) -> str:
    """`1.50× (1.27–1.76)`."""
    return f"{text.gain(gain)} ({gain / (1 + error):.2f}–{gain * (1 + error):.2f})"


def labelled(technique: Technique, t: Translate) -> str:
    """The technique's name, with its format where it has one."""
    title, given = technique_title(technique.name, t), getattr(technique, "format", None)
    return f"{title}, {given}" if given else title


def drafting_words(effect: Effect, t: Translate) -> str:
    """What speculation drafts at the operating point, or that nothing is worth drafting; empty for all else."""
    drafting = effect.after.served.drafting if effect.after is not None else None
    if drafting is None:
        return ""
    if drafting["off"]:
        return t("draft.off")
    words = {"depth": drafting["depth"], "tokens": f"{drafting['tokens_per_step']:.2f}"}
    if drafting.get("tree_size", 0) > drafting["depth"]:
        return t("draft.tree", nodes=drafting["tree_size"], **words)
    return t("draft.chain", **words)
