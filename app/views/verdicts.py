"""Does a predicted gain help, as far as its interval says?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from membound.app import text
from membound.app.engine_choice import ANY_TASK
from membound.app.figures.comparison import proper, technique_title
from membound.app.i18n import Translate
from membound.app.views.said import said
from membound.roofline.techniques import TECHNIQUES, Technique
from membound.simulator.advice.effects import Effect

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
    """The technique's name, with its format or its policy where it has one."""
    return named(technique.name, technique.model_dump(), t)


def named(name: str, parameters: Mapping[str, Any], t: Translate) -> str:
    """The same from the plain data of a technique."""
    title, given = technique_title(name, t), parameters.get("format") or parameters.get("policy")
    if not given:
        return title
    activations, lm_head = parameters.get("activations"), parameters.get("lm_head")
    beside = (f" + {activations}" if activations else "") + (f"{t('sign.comma')}lm_head {lm_head}" if lm_head else "")
    return f"{title}{t('sign.comma')}{proper(str(given))}{beside}"


def about(technique: Technique, t: Translate) -> str:
    """What a technique does in plain words, those for formats with activations where it has them."""
    multiplied = "_multiplied" if technique.model_dump().get("activations") else ""
    try:
        return t(f"techniques.about_{technique.name}{multiplied}")
    except KeyError:
        return (type(technique).__doc__ or "").partition("\n")[0]


def against(name: str, baseline: str, t: Translate) -> str:
    """What a technique is compared with."""
    return t("techniques.against", baseline=baseline_words(name, baseline, t))


def baseline_words(name: str, baseline: str, t: Translate) -> str:
    """A technique's usual baseline by its translation where the language has one; another one as a sentence."""
    usual = name in TECHNIQUES and baseline == TECHNIQUES[name].baseline
    return t.name(f"technique.{name}.baseline", baseline) if usual else said(baseline, t)


def price(technique: Technique, t: Translate) -> str:
    """What the technique costs in quality: nothing, or as far as somebody found out."""
    if technique.lossless:
        return t("techniques.price_none")
    return price_words(technique.quality.note, t)


def price_words(note: str, t: Translate) -> str:
    """A figure that somebody found."""
    return t("techniques.price", note=said(note, t))


def drafting_words(effect: Effect, task: str, t: Translate) -> str:
    """What speculation drafts at the operating point, or that nothing is worth drafting; empty for all else."""
    drafting = effect.after.served.drafting if effect.after is not None else None
    if drafting is None:
        return ""
    if drafting["off"]:
        return t("draft.off")
    source = t("draft.assumed") if task == ANY_TASK else t("draft.task", task=t(f"engine.{task}_task"))
    words = {"depth": drafting["depth"], "tokens": f"{drafting['tokens_per_step']:.2f}", "source": source}
    if drafting.get("tree_size", 0) > drafting["depth"]:
        return t("draft.tree", nodes=drafting["tree_size"], **words)
    return t("draft.chain", **words)
