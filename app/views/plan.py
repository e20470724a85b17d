"""Page Plan: how many of which device does a load take, and what would a faster or cheaper deployment be?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import deployments, text
from membound.app.figures import plan as figures
from membound.app.i18n import Translate
from membound.app.views import asked, states
from membound.app.views.charts import chart, words_table
from membound.app.views.opening import opened, settings_of
from membound.app.views.plan_question import PAGE, PRICE, prices_paid, question
from membound.app.views.plan_tables import compared_table, deployments_table, front_table
from membound.app.views.plan_words import (
    at_the_end,
    headline,
    options,
    other_way,
    prices_in_quality,
    served,
    trust,
    with_loss,
)
from membound.app.views.said import said
from membound.app.views.session import translate
from membound.roofline.errors import MemboundError
from membound.roofline.scenario import parse_scenario

# How workers, whose sentences go to terminals too, write a number of devices.
_COUNTED = re.compile(r"(?<=\d) x (?=\w)")


def page() -> None:
    """Draw the question, and its answer as soon as somebody has asked it."""
    t = translate()
    st.title(t("plan.title"), anchor="top")
    st.caption(t("plan.intro"))
    try:
        spec = question(t)
    except MemboundError as error:
        states.problem(str(error), t("plan.fix"))
        return
    if spec is None:
        return
    prices = prices_paid(spec["devices"], t)
    defaults = not any(name.startswith("plan_") and not name.startswith(PRICE) for name in st.query_params)
    run = asked.answer(PAGE, spec, t("plan.run"), start=defaults)
    document = None if run is None else run.comparison()
    if document is not None:
        document = document if prices is None else deployments.at_prices(document, prices)
        _answer(document, t)
        _downloads(document, t)


def _answer(document: Mapping[str, Any], t: Translate) -> None:
    plans: Sequence[Mapping[str, Any]] = document["devices"]
    best = next((plan for plan in plans if plan["device"] == document["best"]), None)
    if best is None:
        st.header(t("plan.nothing"), anchor="answer")
    else:
        st.header(headline(best, document["objective"], t), anchor="answer")
    _cards(plans, t)
    if best is not None:
        objective = document["objective"]
        st.write(served(best, t) + other_way(best, t) + with_loss(plans, best["best"], objective, t))
        st.write(trust(best, t) + at_the_end(plans, best["best"], objective, t))
    for plan in plans:
        if plan["best"] is None:
            st.warning(
                text.plain(f"{plan['device']}{t('sign.colon')}{said(plan['reason'], t)}"), icon=":material/block:"
            )
    demand = next((plan["demand"] for plan in plans if "demand" in plan), None)
    if demand is None:
        return
    _compared(plans, t)
    _table(plans, demand, t)
    _runners_up(plans, t)
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.header(t("plan.front"), anchor="front")
        picked = chart(
            figures.front_figure(plans, demand["slo"], t),
            key="front",
            alt=figures.front_alt(plans, t),
            caption=t(
                "plan.front_caption",
                model=demand["model"],
                prompt=f"{demand['prompt_tokens']:,.0f}",
                output=f"{demand['output_tokens']:,.0f}",
            ),
            table=front_table(plans, t),
            select=True,
        )
        _point(figures.front_points(plans), picked, demand, t)
    with right:
        if best is not None and best["sensitivity"]:
            _sensitivity(best, t)
    notes = dict.fromkeys(note for plan in plans for note in plan.get("notes", ()))
    if notes:
        st.caption(text.plain(" · ".join(said(note, t) for note in notes)))


def _cards(plans: Sequence[Mapping[str, Any]], t: Translate) -> None:
    """How many of each device, at a glance."""
    with st.container(horizontal=True, gap="large"):
        for plan in plans:
            best = plan["best"]
            gpus = "–" if best is None else t("plan.gpus", gpus=best["gpus"])
            price = None
            if best is not None and best["usd_per_h"] is not None:
                price = t("plan.per_hour_short", usd=f"{best['usd_per_h']:,.2f}")
            st.metric(plan["device"], gpus, price, delta_color="off", delta_arrow="off", width="content")


def _compared(plans: Sequence[Mapping[str, Any]], t: Translate) -> None:
    """What each device takes, with prompts and outputs on the same engines and on engines of their own."""
    compared = deployments.both_ways(plans)
    if not any(one["disaggregated"] for one in compared):
        return
    st.header(t("plan.ways"), anchor="ways")
    chart(
        figures.compared_figure(compared, t),
        key="compared",
        alt=figures.compared_alt(compared, t),
        caption=t("plan.compared_caption"),
        table=compared_table(compared, t),
    )


def _runners_up(plans: Sequence[Mapping[str, Any]], t: Translate) -> None:
    """What the simulator also saw keep the objective, at a higher price or with more devices."""
    rows = [one for plan in plans for one in plan.get("confirmed", ())[1:]]
    if rows:
        with st.expander(t("plan.runners_up", count=len(rows))):
            words_table(deployments_table(rows, t))


def _table(plans: Sequence[Mapping[str, Any]], demand: Mapping[str, Any], t: Translate) -> None:
    rows = options(plans)
    if not rows:
        return
    st.header(t("plan.deployments"), anchor="deployments")
    words_table(deployments_table(rows, t))
    prices = {one["device"]: one["price"] for one in rows if one["price"]}
    st.caption(t("plan.table_caption"))
    for precision, notes in prices_in_quality(plans, t).items():
        costs = t("plan.costs", precision=t(f"plan.precision_{precision}"), notes=t("sign.semicolon").join(notes))
        st.caption(text.plain(costs))
    with st.expander(t("plan.sources")):
        lines = [
            f"{device}{t('sign.colon')}{said(price['source'], t)}{t('sign.comma')}{price['date']}"
            for device, price in prices.items()
        ]
        st.markdown("\n".join(f"- {text.plain(line)}" for line in lines or [t("plan.own_prices")]))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(t("plan.open"))
        for index, one in enumerate(rows):
            precision = t(f"plan.precision_{one['deployment']['precision']}")
            opened(
                f"{one['gpus']} × {one['device']}{t('sign.comma')}{precision}",
                settings_of(one, demand),
                key=f"open_{index}",
            )


def _point(points: Sequence[Mapping[str, Any]], picked: Sequence[Any], demand: Mapping[str, Any], t: Translate) -> None:
    """What a click on the front chose, with a way into Simulate."""
    number = next((one for one in picked if isinstance(one, int) and 0 <= one < len(points)), None)
    if number is None:
        st.caption(t("plan.click"))
        return
    point = points[number]
    name = f"{point['gpus']} × {point['device']}, " + t("plan.batch", batch=round(point["batch"]))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(t("plan.open"))
        opened(name, settings_of(point, demand), key="open_point")


def _downloads(document: Mapping[str, Any], t: Translate) -> None:
    """All answers as JSON, and the best deployment as a scenario that `membound simulate` takes."""
    best = next((plan["best"] for plan in document["devices"] if plan["device"] == document["best"]), None)
    with st.container(horizontal=True):
        content = json.dumps(document, ensure_ascii=False, indent=1)
        st.download_button(t("download.json"), content, "membound-plan.json", "application/json", on_click="ignore")
        if best is not None:
            scenario = parse_scenario(best["scenario"]).to_yaml()
            st.download_button(
                t("download.yaml"), scenario, "membound-plan.yaml", "application/yaml", on_click="ignore"
            )


def _sensitivity(plan: Mapping[str, Any], t: Translate) -> None:
    found = plan["sensitivity"]
    st.header(t("plan.sensitivity"), anchor="sensitivity")
    binds = t(f"plan.resource_{found['binds']}") if found["binds"] else "–"
    chart(
        figures.sensitivity_figure(found["elasticity"], t),
        key="sensitivity",
        alt=t("plan.sensitivity_alt", binds=binds),
        caption=t("plan.sensitivity_caption", device=plan["device"]),
        table=pd.DataFrame(
            {t("plan.c_resource"): t(f"plan.resource_{name}"), t("plan.elasticity"): round(value, 3)}
            for name, value in found["elasticity"].items()
        ),
    )
    changes = found["answer_changes"]
    if changes:
        listed = t("sign.semicolon").join(
            f"{_input(change, t)} → {said(answer, t)}" for change, answer in changes.items()
        )
        words = t("plan.changes", answer=said(found["screened_answer"], t), changes=listed)
    else:
        words = t("plan.no_changes", answer=said(found["screened_answer"], t))
    st.write(text.plain(_COUNTED.sub(" × ", words)))


def _input(change: str, t: Translate) -> str:
    """`slo.ttft_s +10 %` in words."""
    name, _, by = change.removeprefix("slo.").partition(" ")
    return t(f"plan.input_{name}", by=by.replace("-", "−"))
