"""Page Start: what is this, what holds this machine back, and is the prediction true?"""

from __future__ import annotations

import streamlit as st

from membound.app import jobs
from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.app.records import Job
from membound.app.views import history, results, states, tour
from membound.app.views.console import console
from membound.app.views.machine import machine_card
from membound.app.views.session import has_torch, show_job, shown_job, store, this_machine, translate
from membound.roofline.scenario import Scenario, load_scenario

SCENARIO, FIRST_LOOK = "live-cpu", "live-cpu-first-look"
# A newcomer waits a minute: one number of users, few requests, and twice, so that there is a spread. All of the
# scenario is the next button.
USERS, REQUESTS, REPEATS = 4, 12, 2
LOOKED_AT = 20
# Questions that need no measurement, each with the page that answers it, and what its address says.
QUESTIONS = {"techniques": {"batch": "32"}, "plan": {}, "advisor": {}}


def page() -> None:
    """Draw the roofline of this machine, and the newcomer's measurement in whatever state it is."""
    t = translate()
    st.title(t("start.title"), anchor="top")
    st.markdown(t("start.intro"))
    _questions()
    job = _measurement()
    _measure(job)
    machine_card()


def _questions() -> None:
    if "pages" not in st.session_state:
        return
    t = translate()
    with st.container(horizontal=True, vertical_alignment="center", key="questions"):
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
    with st.container(border=True, key="measure_box"):
        st.header(t("start.measure_title"), anchor="measure")
        whole = load_scenario(SCENARIO)
        titles = t("sign.list").join(technique_title(technique.name, t) for technique in whole.techniques)
        st.markdown(t("start.measure_intro", model=whole.model, techniques=titles, users=USERS))
        if job is not None and job.active:
            console(job.id)
            return
        seen = job is not None and job.state == "done"
        with st.container(horizontal=True, vertical_alignment="center"):
            first, all_of_it = first_look(whole), t("start.measure_whole", users=_users_of(whole, t))
            _button("measure", t("start.measure_again" if seen else "start.measure"), first, primary=not seen)
            _button("measure_whole", all_of_it, whole, primary=seen)
        if this_machine() is None and has_torch():
            st.caption(t("start.wait_for_roofs"))
        if job is not None:
            _outcome(job)


def _button(key: str, label: str, scenario: Scenario, *, primary: bool) -> None:
    """A button that compares a scenario; where the roofs are being measured still, the run waits for them."""
    if st.button(label, key=key, type="primary" if primary else "secondary", disabled=not has_torch()):
        show_job(jobs.submit(store(), "compare", {"scenario": scenario.to_yaml()}))
        st.rerun()


def _users_of(scenario: Scenario, t: Translate) -> str:
    """The numbers of users that a scenario sweeps over."""
    return t("sign.list").join(str(changed["workload.arrivals.concurrency"]) for changed in scenario.sweep)


def first_look(whole: Scenario) -> Scenario:
    """The same engine and techniques at one operating point, with as few requests as show them at work."""
    point = {"workload.arrivals.concurrency": USERS, "workload.requests": REQUESTS}
    said = f"{whole.name} at {USERS} users with {REQUESTS} requests: the newcomer's first look."
    short = {"name": FIRST_LOOK, "description": said, "repeats": REPEATS}
    return whole.model_copy(update={"sweep": (point,)}).with_values(short)


def _outcome(job: Job) -> None:
    t = translate()
    if job.state != "done" or job.result is None:
        states.ended_badly(job)
        return
    results.outcome(job.result, job.spec["scenario"], history.scenario_name(job))
    st.page_link(st.session_state["pages"]["live"], label=t("start.to_live"), icon=":material/play_arrow:")


def _measurement() -> Job | None:
    """The measurement that the URL names, else the newest one of anybody that was not cancelled."""
    name = shown_job()
    for job in store().jobs("compare", limit=LOOKED_AT):
        here = "endpoint" not in job.spec and job.state != "cancelled"
        ours = here and history.scenario_name(job) in (SCENARIO, FIRST_LOOK)
        if job.id == name or (name is None and ours):
            return jobs.poll(store(), job.id)
    return None
