"""Page Stack: what do techniques gain together, against the product of what each gains alone?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.engine_choice import EngineChoice, stacked
from membound.app.figures import stack as figures
from membound.app.figures.comparison import technique_title
from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.app.views import background, fields, states
from membound.app.views.asked import answer
from membound.app.views.charts import chart
from membound.app.views.choices import some_techniques
from membound.app.views.engine_choice import choose_engine, conditions, in_short
from membound.app.views.form import form
from membound.app.views.measured import ABOUT, measured_gains, measured_together, nearest
from membound.app.views.said import said
from membound.app.views.session import translate
from membound.app.views.verdicts import baseline_words, interval, named
from membound.roofline.errors import MemboundError
from membound.roofline.techniques import TECHNIQUES

CHOSEN = ["weight_quantization", "kv_quantization", "eagle"]
ORDERS = {"greedy": "stack.order_greedy", "given": "stack.order_given"}
WAYS = {"closed_form": "stack.by_closed_form", "simulation": "stack.by_simulation"}
ANSWERS = {"less": "stack.answer_less", "more": "stack.answer_more", "same": "stack.answer_same"}
# The number of engines doubles with each technique: more than so many are a job of their own.
AT_ONCE = 4
# Below this the gain of two is less than multiplying gives.
OVERLAPS = 0.98


def page() -> None:
    """Draw the stack of the techniques that the widgets, and so the URL, hold."""
    t = translate()
    st.title(t("stack.title"), anchor="top")
    st.caption(t("stack.intro"))
    try:
        with form(t) as holds:
            how: dict[str, str] = {}
            choice = choose_engine(t, formats=True, more=lambda: how.update(_how(t)))
            names = some_techniques("stack", TECHNIQUES, CHOSEN, t("stack.techniques"), t("stack.techniques_help"), t)
            holds(in_short(choice, t, names))
        if not names:
            st.info(t("stack.empty"), icon=":material/stacks:")
            return
        document = _document(choice, names, how["way"] == "simulation", t)
    except MemboundError as error:
        states.problem(str(error), t("stack.error_help"))
        return
    if document is not None:
        _drawn(choice, document, how["order"], t)


def _how(t: Translate) -> dict[str, str]:
    """In which order techniques are added, and how the engines are computed."""
    return {
        "order": fields.one_of("choice", "added", list(ORDERS), "greedy", t, lambda name: t(ORDERS[name])),
        "way": fields.one_of("choice", "way", list(WAYS), "closed_form", t, lambda name: t(WAYS[name])),
    }


def _document(choice: EngineChoice, names: Sequence[str], simulate: bool, t: Translate) -> dict[str, Any] | None:
    """The analysis, at once where it is quick, else from the store or a job; None while nobody has asked for it."""
    if len(names) <= AT_ONCE and not simulate:
        asked = background.ask((choice.key, tuple(names)), stacked, choice, tuple(names))
        return background.answer(asked, "stack")
    spec = {
        "scenario": choice.scenario.to_yaml(),
        "techniques": [choice.technique(name).model_dump(mode="json") for name in names],
        "batch": choice.batch,
        "context": choice.context,
        "metric": choice.metric,
        "simulate": simulate,
    }
    st.caption(t("stack.long_simulation" if simulate else "stack.long", engines=2 ** len(names)))
    run = answer("stack", spec, t("stack.analyse", techniques=len(names)))
    return None if run is None else run.comparison()


def _drawn(choice: EngineChoice, document: dict[str, Any], order: str, t: Translate) -> None:
    stack = document["stack"]
    if stack["reason"] is not None:
        states.problem(stack["reason"], t("stack.error_help"))
        return
    steps = stack[f"{order}_order"]
    _refused(stack, t)
    if not stack["members"]:
        return
    _answer(document, steps, t)
    _waterfall(choice, document, steps, t)
    left, right = st.columns([3, 2], gap="large")
    with left:
        _shares(choice, document, t)
    with right:
        _pairs(choice, document, t)


def _refused(stack: dict[str, Any], t: Translate) -> None:
    """What cannot join the others, each in a sentence."""
    for step in stack["given_order"]:
        if step["reason"] is not None:
            title = technique_title(step["technique"], t)
            refused = t("stack.refused", technique=title, reason=said(step["reason"], t))
            st.warning(text.plain(refused), icon=":material/block:")


def _answer(document: dict[str, Any], steps: Sequence[dict[str, Any]], t: Translate) -> None:
    """Together against multiplied, where the bottleneck went, and what would be better than all."""
    stack, error = document["stack"], document["relative_error"]
    together, product = stack["together"], stack["product"]
    of = {"metric": t(f"short.{stack['metric']}"), "together": interval(together, error)}
    if product is None or len(stack["members"]) == 1:
        st.header(t("stack.answer_together", **of), anchor="answer")
    else:
        ratio = together / product
        kind = "less" if ratio < OVERLAPS else "more" if ratio > 1 / OVERLAPS else "same"
        st.header(t(ANSWERS[kind], product=text.gain(product), **of), anchor="answer")
    bounds = [stack["plain"]["bottleneck"], *(step["bottleneck_after"] for step in steps if step["reason"] is None)]
    path = [bound for index, bound in enumerate(bounds) if index == 0 or bound != bounds[index - 1]]
    words = " → ".join(bound_words(bound, t) for bound in path)
    sentences = [t("stack.moved" if len(path) > 1 else "stack.stayed", path=words)]
    best = stack["best_subset"]
    if best["gain"] > 1.005 * together:
        chosen = t("sign.list").join(technique_title(name, t) for name in best["techniques"]) or t("stack.none")
        sentences.append(t("stack.better", techniques=chosen, gain=text.gain(best["gain"])))
    lossless = {technique["name"]: technique["lossless"] for technique in document["techniques"]}
    lossy = [technique_title(name, t) for name in stack["members"] if not lossless[name]]
    sentences.append(t("stack.lossy", techniques=t("sign.list").join(lossy)) if lossy else t("stack.lossless"))
    st.markdown(" ".join(sentences))


def _waterfall(choice: EngineChoice, document: dict[str, Any], steps: Sequence[dict[str, Any]], t: Translate) -> None:
    stack, error = document["stack"], document["relative_error"]
    per_token = stack["metric"] == "tpot_s"
    plain = stack["plain"]["tpot_s"] * 1e3 if per_token else stack["plain"]["output_tokens_per_s"]

    def value(gain: float) -> float:
        return plain / gain if per_token else plain * gain

    bound = stack["plain"]["bottleneck"]
    levels = [figures.Level(t("stack.plain"), 0.0, plain, bound, text.gain(1.0))]
    before = plain
    for step in steps:
        if step["reason"] is None:
            after = value(step["together"])
            title = f"+ {_named(step, t)}"
            levels.append(figures.Level(title, before, after, step["bottleneck_after"], text.gain(step["gain"])))
            before = after
    levels.append(figures.Level(t("stack.all"), 0.0, before, levels[-1].bound, text.gain(stack["together"])))
    product = value(stack["product"]) if stack["product"] is not None and len(stack["members"]) > 1 else None
    ran = measured_together(choice, document["kept"], stack["members"])
    st.header(t("stack.waterfall"), anchor="waterfall")
    kept = t("sign.list").join(technique_title(name, t) for name in document["kept"]) or t("stack.none")
    chart(
        figures.waterfall_figure(
            levels,
            product,
            None if ran is None else value(ran.gain(stack["metric"])),
            error,
            t("comparison.tpot_y" if per_token else "sweep.rate_y"),
            t,
        ),
        key="stack_waterfall",
        alt=t("stack.waterfall_alt", steps=len(levels) - 2, gain=text.gain(stack["together"])),
        caption=t(
            "stack.waterfall_caption",
            kept=kept,
            way=t(WAYS["simulation" if document["simulated"] else "closed_form"]),
            measured=t("stack.no_run") if ran is None else t("stack.a_run", run=ran.run_id, users=f"{ran.users:g}"),
            conditions=conditions(choice, t),
        ),
        table=_steps_table(steps, error, t),
    )


def _named(step: dict[str, Any], t: Translate) -> str:
    """A technique with its format, or with the size of its drafts."""
    title, drafting = technique_title(step["technique"], t), step["drafting"]
    if drafting is None:
        return named(step["technique"], step["parameters"], t)
    if drafting["off"]:
        return t("stack.off", technique=title)
    return t("stack.drafts", technique=title, guesses=drafting.get("tree_size", drafting["depth"]))


def _steps_table(steps: Sequence[dict[str, Any]], error: float, t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("column.technique"): _named(step, t),
            t("column.baseline"): baseline_words(step["technique"], step["baseline"], t),
            t("stack.adds"): "–" if step["gain"] is None else interval(step["gain"], error),
            t("stack.together"): "–" if step["together"] is None else text.gain(step["together"]),
            t("stack.sequences"): "–" if step["batch"] is None else f"{step['batch']:.0f}",
            t("column.bound"): (
                t(f"bound.{step['bottleneck_after']}") if step["bottleneck_after"] else said(step["reason"], t)
            ),
        }
        for step in steps
    )


def _shares(choice: EngineChoice, document: dict[str, Any], t: Translate) -> None:
    stack = document["stack"]
    shapley = stack["shapley_ln_gain"] or {}
    measured = measured_gains(choice.model_name, choice.device_name)
    rows = []
    for step in stack["alone"]:
        near = nearest(measured, choice.technique(step["technique"]), choice.batch, ABOUT)
        comparable = near is not None and near.row.metric == stack["metric"]
        share = shapley.get(step["technique"])
        rows.append(
            figures.Share(
                _named(step, t),
                step["gain"],
                None if share is None else math.exp(share),
                near.row.measured if near is not None and comparable else None,
                near.row.spread if near is not None and comparable else None,
            )
        )
    st.header(t("stack.shares"), anchor="shares")
    chart(
        figures.shares_figure(rows, t),
        key="stack_shares",
        alt=t("stack.shares_alt", techniques=len(rows)),
        caption=t("stack.shares_caption"),
        table=pd.DataFrame(
            {
                t("column.technique"): row.title,
                t("stack.alone"): "–" if row.alone is None else text.gain(row.alone),
                t("stack.share"): "–" if row.share is None else text.gain(row.share),
                t("column.measured"): "–" if row.measured is None else text.gain(row.measured),
            }
            for row in rows
        ),
    )


def _pairs(choice: EngineChoice, document: dict[str, Any], t: Translate) -> None:
    names = document["stack"]["members"]
    if len(names) < 2:
        return
    known = {frozenset(pair["techniques"]): pair["ratio"] for pair in document["stack"]["pairs"]}
    ratios = [[None if one == other else known.get(frozenset((one, other))) for other in names] for one in names]
    st.header(t("stack.pairs"), anchor="pairs")
    titles = [technique_title(name, t) for name in names]
    chart(
        figures.pairs_figure(titles, ratios, t),
        key="stack_pairs",
        alt=t("stack.pairs_alt", pairs=len(known)),
        caption=t("stack.pairs_caption"),
        table=pd.DataFrame(
            {
                t("column.technique"): " + ".join(technique_title(name, t) for name in pair["techniques"]),
                t("stack.together"): "–" if pair["real"] is None else text.gain(pair["real"]),
                t("stack.multiplied"): text.gain(pair["product"]),
                t("stack.refusal"): said(pair["reason"] or "", t),
            }
            for pair in document["stack"]["pairs"]
        ),
    )
