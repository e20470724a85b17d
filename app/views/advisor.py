"""Page Advisor: what binds the engine here, what should be changed first, and at what price?"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.engine_choice import ENGINE, EngineChoice, advised, not_to_combine
from membound.app.figures import techniques as figures
from membound.app.figures.comparison import technique_title
from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.app.views import background, states
from membound.app.views.charts import chart, share_bars
from membound.app.views.choices import some_techniques
from membound.app.views.engine_choice import choose_engine, conditions, in_short
from membound.app.views.form import form
from membound.app.views.said import in_words, said
from membound.app.views.session import translate
from membound.app.views.verdicts import (
    MARKS,
    against,
    baseline_words,
    interval,
    named,
    price_words,
    verdict_of,
)
from membound.roofline.errors import MemboundError
from membound.roofline.techniques import TECHNIQUES

# Moves that have a card of their own; the table has all.
FIRST = 3
# Pairs are shown at once where they are known, and are not waited for.
PAIRS_WAIT_S, PAIRS_HEIGHT = 0.02, 160
# A gain below this is no reason to change an engine.
WORTH = 1.02


def page() -> None:
    """Draw the advice for the engine that the widgets, and so the URL, hold."""
    t = translate()
    st.title(t("advisor.title"), anchor="top")
    st.caption(t("advisor.intro"))
    try:
        with form(t) as holds:
            choice = choose_engine(t).having(_has(t))
            holds(in_short(choice, t, choice.techniques))
        known = background.ask(choice.key, advised, choice)
        pairs = background.ask(choice.key, not_to_combine, choice)
        document = background.answer(known, "advisor")
    except MemboundError as error:
        states.problem(str(error), t("advisor.error_help"))
        return
    if document is None:
        return
    _answer(choice, document, t)
    _cards(document, t)
    _moves(choice, document, t)
    _rules(document, t)
    _conflicts(pairs, t)


def _has(t: Translate) -> list[str]:
    """The techniques that the engine has already; those that every engine has are not asked for."""
    names = [name for name, technique in TECHNIQUES.items() if not technique.usual]
    return some_techniques("has", names, ENGINE, t("advisor.has"), t("advisor.has_help"), t)


def _answer(choice: EngineChoice, document: dict[str, Any], t: Translate) -> None:
    """What binds and what to do first, in two sentences."""
    now, moves = document["now"], document["moves"]
    worth = _worth(document)
    if now is None:
        makes_fit = [_named(move, t) for move in moves if move["possible"]]
        st.header(t("advisor.no_fit", model=choice.model_name), anchor="answer")
        others = t("sign.list").join(makes_fit[1:]) or t("stack.none")
        if makes_fit:
            st.markdown(t("advisor.makes_fit", first=makes_fit[0], others=others))
        else:
            st.markdown(t("advisor.nothing_fits"))
        return
    bound = now["bottleneck"]
    share = text.percent(now["shares"][bound])
    binds = bound_words(bound, t)
    first = next((move for move in worth if move["devices"] is None), None)
    if first is None:
        st.header(t("advisor.answer_none", bound=binds, share=share), anchor="answer")
    else:
        st.header(
            t("advisor.answer", bound=binds, share=share, move=_named(first, t), gain=text.gain(first["gain"])),
            anchor="answer",
        )
    situation = document["situation"]
    sentences = [
        t(
            "advisor.now",
            time=text.milliseconds(now["tpot_s"]),
            rate=text.rate(now["output_tokens_per_s"]),
            batch=f"{now['batch']:.0f}",
            prompts=text.percent(situation["prompt_share"]),
        )
    ]
    if situation["queued"] >= 1:
        sentences.append(t("advisor.queued", queued=f"{situation['queued']:.0f}"))
    shares = sorted(((b, s) for b, s in now["shares"].items() if s >= 0.005), key=lambda item: -item[1])
    if len(shares) > 1:
        following = shares[1]
        sentences.append(t("advisor.next_bound", bound=t(f"bound.{following[0]}"), share=text.percent(following[1])))
    wider = next((move for move in worth if move["devices"] is not None), None)
    if wider is not None:
        sentences.append(t("advisor.wider", devices=wider["devices"][1], gain=interval(wider["gain"], wider["error"])))
    left, right = st.columns([3, 2], gap="large")
    left.markdown(" ".join(sentences))
    with right:
        share_bars(shares, t)


def _worth(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What can be changed and is worth it, or makes the model fit; the best first."""
    possible = [move for move in document["moves"] if move["possible"] and move["state"] != "on"]
    return [move for move in possible if move["gain"] is None or move["gain"] >= WORTH]


def _named(move: dict[str, Any], t: Translate) -> str:
    """A move with its format, or with what it drafts."""
    if move["move"] not in TECHNIQUES:
        return t("advisor.more_devices", devices=move["devices"][1]) if move["devices"] else said(move["title"], t)
    title, drafting = technique_title(move["move"], t), move["drafting"]
    if drafting is not None and not drafting["off"]:
        return t("stack.drafts", technique=title, guesses=drafting.get("tree_size", drafting["depth"]))
    return named(move["move"], move["parameters"], t)


# --- the first moves ---


def _cards(document: dict[str, Any], t: Translate) -> None:
    moves = _worth(document)
    if document["now"] is not None:
        moves = [move for move in moves if move["devices"] is None]
    first = _of_different_layers(moves)[:FIRST]
    if not first:
        return
    st.header(t("advisor.first"), anchor="first")
    for place, (move, column) in enumerate(zip(first, st.columns(FIRST), strict=False), start=1):
        with column, st.container(border=True, height="stretch"):
            _card(place, move, document, t)


def _of_different_layers(moves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best move of each layer: two of one layer mostly exclude each other."""
    best: dict[str, dict[str, Any]] = {}
    for move in moves:
        layer = TECHNIQUES[move["move"]].layer if move["move"] in TECHNIQUES else move["move"]
        best.setdefault(layer, move)
    return list(best.values())


def _card(place: int, move: dict[str, Any], document: dict[str, Any], t: Translate) -> None:
    st.markdown(f"**{place}. {_named(move, t)}**")
    with st.container(horizontal=True, gap="small"):
        if move["devices"] is not None:
            st.badge(t("advisor.hardware"), color="gray")
        else:
            kind = "lossless" if move["lossless"] else "lossy"
            st.badge(t(f"techniques.{kind}"), color="green" if move["lossless"] else "orange")
    gain = move["gain"]
    if gain is None:
        st.markdown(t("techniques.makes_fit"))
    else:
        verdict = verdict_of(gain, move["error"])
        words = t(f"techniques.verdict_{verdict}")
        metric = t(f"short.{document['metric']}")
        st.markdown(f"{MARKS[verdict]} **{interval(gain, move['error'])}** {metric} · {words}")
    st.markdown(_why(move, document, t))
    st.caption("  \n".join(_price(move, t)))
    if move["move"] in TECHNIQUES and "pages" in st.session_state:
        own = [one["name"] for one in document["scenario"]["techniques"] if one["name"] not in move["instead_of"]]
        if st.button(t("advisor.to_stack"), key=f"to_stack_{place}", icon=":material/stacks:"):
            st.session_state["stack"] = [*(name for name in own if name not in ENGINE), move["move"]]
            st.switch_page(st.session_state["pages"]["stack"])


def _why(move: dict[str, Any], document: dict[str, Any], t: Translate) -> str:
    """What bound before and how much of it is left, and what binds next."""
    now, after = document["now"], move["shares_after"]
    if now is None or after is None:
        return t("advisor.why_fits")
    before, bound = move["bottleneck_before"], move["bottleneck_after"]
    words = {
        "before": t(f"bound.{before}"),
        "was": text.percent(now["shares"].get(before, 0.0)),
        "bound": bound_words(bound, t),
        "share": text.percent(after[bound]),
    }
    told = t("advisor.why_moves" if bound != before else "advisor.why_stays", **words)
    drafting = move["drafting"]
    if drafting is None or drafting["off"]:
        return told
    return f"{told} {t('advisor.why_steps', tokens=text.digits(drafting['tokens_per_step']))}"


def _price(move: dict[str, Any], t: Translate) -> list[str]:
    """What a move costs, what it is compared with, and the other metric where it says otherwise."""
    lines = []
    if move["devices"] is not None:
        before, after = move["devices"]
        lines.append(t("advisor.price_devices", before=before, after=after))
    else:
        lines.append(_quality(move, t))
    lines.append(against(move["move"], move["baseline"], t))
    gain, other = move["gain"], move["other_gain"]
    if gain is not None and other is not None and (other - 1) * (gain - 1) < 0:
        lines.append(t("advisor.other_metric", gain=text.gain(other)))
    if move["instead_of"]:
        given_up = t("sign.list").join(technique_title(name, t) for name in move["instead_of"])
        lines.append(t("advisor.instead", techniques=given_up))
    return lines


def _quality(move: dict[str, Any], t: Translate) -> str:
    if move["lossless"]:
        return t("techniques.price_none")
    return price_words(move["quality"]["note"], t)


# --- all moves ---


def _moves(choice: EngineChoice, document: dict[str, Any], t: Translate) -> None:
    costed = [move for move in document["moves"] if move["gain"] is not None]
    st.header(t("advisor.all"), anchor="all")
    gains = [
        figures.Gain(
            f"{_named(move, t)}{t('advisor.on') if move['state'] == 'on' else ''}",
            move["gain"],
            move["low"],
            move["high"],
        )
        for move in costed
    ]
    table = _table(document, t)
    if not gains:
        st.dataframe(table, hide_index=True, key="advisor_moves")
        return
    chart(
        figures.gains_figure(gains, t),
        key="advisor_gains",
        alt=t("techniques.gains_alt", techniques=len(gains), best=gains[0].title, gain=text.gain(gains[0].predicted)),
        caption=t("advisor.gains_caption", metric=t(f"short.{document['metric']}"), conditions=conditions(choice, t)),
        table=table,
    )
    refused = [move for move in document["moves"] if not move["possible"]]
    if refused:
        with st.expander(t("advisor.refused", moves=len(refused))):
            reasons = [
                f"**{_named(move, t)}**{t('sign.colon')}{text.plain(in_words(move['reason'], t))}" for move in refused
            ]
            st.markdown("\n".join(f"- {reason}" for reason in reasons))


def _table(document: dict[str, Any], t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("advisor.move"): _named(move, t),
            t("column.predicted"): "–" if move["gain"] is None else interval(move["gain"], move["error"]),
            t("column.baseline"): baseline_words(move["move"], move["baseline"], t),
            t("column.bound"): t(f"bound.{move['bottleneck_after']}") if move["bottleneck_after"] else "–",
            t("advisor.price"): said(move["price"] or "", t)
            or (t("techniques.lossless") if move["lossless"] else said(move["quality"]["note"], t)),
            t("advisor.source"): said(move["quality"]["source"], t),
            t("advisor.remark"): "" if move["possible"] else said(move["reason"], t),
        }
        for move in document["moves"]
    )


# --- the rules of thumb, and what not to add up ---


def _conflicts(pairs: Future[list[dict[str, Any]]], t: Translate) -> None:
    """What comes last, as it takes longest: nobody waits for it who reads the page from its top."""
    conflicts = background.answer(pairs, "advisor_pairs", wait_s=PAIRS_WAIT_S, height=PAIRS_HEIGHT)
    if not conflicts:
        return
    st.header(t("advisor.conflicts"), anchor="conflicts")
    lines = []
    for one in conflicts:
        names = " + ".join(technique_title(name, t) for name in one["moves"])
        if one["product"] is None:
            lines.append(f"- **{names}**{t('sign.colon')}{t('advisor.exclude')}")
        elif one["real"] is None:
            lines.append(f"- **{names}**{t('sign.colon')}{text.plain(in_words(one['reason'], t))}")
        else:
            words = t("advisor.overlap", real=text.gain(one["real"]), product=text.gain(one["product"]))
            lines.append(f"- **{names}**{t('sign.colon')}{words}")
    st.markdown("\n".join(lines))


def _rules(document: dict[str, Any], t: Translate) -> None:
    """The rules of thumb that hold here, each with whether costing agrees."""
    if not document["rules"]:
        return
    st.header(t("advisor.rules"), anchor="rules")
    agreed = {True: "agrees", False: "disagrees", None: "unknown"}
    lines = []
    for rule in document["rules"]:
        name = rule["id"].lower()
        first = t("sign.list").join(technique_title(move, t) for move in rule["first_moves"] if move in TECHNIQUES)
        words = {"condition": t(f"advisor.{name}_condition"), "advice": t(f"advisor.{name}_advice")}
        line = [t("advisor.rule", **words)]
        if first and rule["id"] != "R0":
            line.append(t("advisor.rule_moves", moves=first))
        if first or rule["agrees"] is not None:
            line.append(t(f"advisor.rule_{agreed[rule['agrees']]}"))
        lines.append(f"- {' '.join(line)}")
    st.markdown("\n".join(lines))
