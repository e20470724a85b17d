"""Page Start: what is this, what holds this machine back, and is the prediction true?"""

from __future__ import annotations

import streamlit as st

from membound.app import jobs
from membound.app.store import Job
from membound.app.views import results, states, tour
from membound.app.views.console import console
from membound.app.views.machine import machine_card
from membound.app.views.session import has_torch, show_job, shown_job, store, this_machine, translate
from membound.roofline.scenario import load_scenario

SCENARIO = "live-cpu"
LOOKED_AT = 20
# Questions that need no measurement, each with the page that answers it, and what its address says.
QUESTIONS = {"techniques": {"batch": "32"}, "plan": {}, "advisor": {}}


def page() -> None:
    """Draw the roofline of this machine, and the newcomer's measurement in whatever state it is."""
    t = translate()
    st.title(t("start.title"))
    st.markdown(t("start.intro"))
    _questions()
    job = _measurement()
    _measure(job)
    machine_card()


def _questions() -> None:
    if "pages" not in st.session_state:
        return
    t = translate()
    with st.container(horizontal=True, vertical_alignment="center"):
        tour.begin(t)
        for page, choices in QUESTIONS.items():
            st.page_link(
                st.session_state["pages"][page],
                label=t(f"start.ask_{page}"),
                icon=":material/help:",
                query_params=choices,
            )


def _measure(job: Job | None) -> None:
    t = translate()
    with st.container(border=True):
        st.header(t("start.measure_title"))
        scenario = load_scenario(SCENARIO)
        st.markdown(t("start.measure_intro", model=scenario.model, techniques=len(scenario.techniques)))
        if job is not None and job.active:
            console(job.id)
            return
        ready = this_machine() is not None
        label = t("start.measure") if job is None else t("start.measure_again")
        if st.button(label, key="measure", type="primary", disabled=not ready):
            show_job(jobs.submit(store(), "compare", {"scenario": scenario.to_yaml()}))
            st.rerun()
        if not ready and has_torch():
            st.caption(t("start.wait_for_roofs"))
        if job is not None:
            _outcome(job)


def _outcome(job: Job) -> None:
    t = translate()
    if job.state != "done" or job.result is None:
        states.ended_badly(job)
        return
    results.outcome(job.result, job.spec["scenario"], SCENARIO)
    st.page_link(st.session_state["pages"]["live"], label=t("start.to_live"), icon=":material/play_arrow:")


def _measurement() -> Job | None:
    """The measurement that the URL names, else the newest one of anybody that was not cancelled."""
    name = shown_job()
    for job in store().jobs("compare", limit=LOOKED_AT):
        here = "endpoint" not in job.spec and job.state != "cancelled"
        ours = here and job.spec.get("scenario", "").startswith(f"name: {SCENARIO}\n")
        if job.id == name or (name is None and ours):
            return jobs.poll(store(), job.id)
    return None
