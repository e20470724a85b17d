"""Page Live: run a scenario on this machine, watch it, and find it again later."""

from __future__ import annotations

import streamlit as st

from membound.app import jobs, text
from membound.app.figures.comparison import technique_title
from membound.app.home import StoreError
from membound.app.i18n import Translate
from membound.app.named_files import scenario_of_page
from membound.app.tasks import scenario_of
from membound.app.views import history, linked, results, states
from membound.app.views.console import console
from membound.app.views.devices import device_title
from membound.app.views.machine_choice import can_simulate, choose_machine
from membound.app.views.session import has_torch, show_job, shown_job, shown_run, store, translate
from membound.roofline.errors import MemboundError
from membound.roofline.scenario import Scenario, shipped_scenarios

# What a newcomer runs, and what an example of a scenario looks like.
FIRST = "live-cpu"
OWN = "own"
KINDS = ("compare", "measure", "simulate")
# Weights that are no file.
MADE = ("pretrained", "random")
UPLOAD_MB = 1


def page() -> None:
    """Draw the choice of a scenario, the job that the URL names, and the history."""
    t = translate()
    st.title(t("live.title"), anchor="top")
    st.caption(t("live.intro"))
    if not has_torch():
        states.no_torch()
    with st.expander(t("live.another"), icon=":material/add:") if _has_answer() else st.container(border=True):
        _choose(t)
    _shown(t)
    history.history()


def _has_answer() -> bool:
    """Whether the URL names a run that goes on or has ended well: then that is what the page is about."""
    if (job_id := shown_job()) is None:
        return shown_run() is not None
    try:
        return store().job(job_id).state in ("queued", "running", "done")
    except StoreError:
        return False


def _choose(t: Translate) -> None:
    left, right = st.columns([2, 3])
    with left:
        names = [*sorted(shipped_scenarios(), key=lambda name: name != FIRST), OWN]
        linked.seed("scenario", linked.one_of(names), names[0])
        name = st.selectbox(
            t("live.scenario"),
            names,
            key="scenario",
            persist_state="session",
            format_func=lambda name: t("live.own") if name == OWN else name,
        )
        linked.keep("scenario", names[0])
    with right:
        linked.seed("kind", linked.one_of(KINDS), KINDS[0])
        kind = st.segmented_control(
            t("live.kind"),
            KINDS,
            key="kind",
            required=True,
            wrap=True,
            persist_state="session",
            format_func=lambda kind: t(f"kind.{kind}"),
            help=t("help.kind"),
        )
        linked.keep("kind", KINDS[0])
    yaml_text = _own_yaml(t) if name == OWN else shipped_scenarios()[name or names[0]]
    scenario = _checked(yaml_text, name == OWN, kind or KINDS[0], t)
    if scenario is not None and kind != "simulate":
        chosen = choose_machine(scenario, kind or KINDS[0], t)
        if chosen.scenario is not scenario:
            yaml_text = chosen.scenario.to_yaml()
        spec, ready = chosen.spec, chosen.ready
    else:
        spec, ready = {}, scenario is not None and can_simulate(scenario, t)
    if st.button(t("live.run"), key="run", type="primary", disabled=not ready):
        show_job(jobs.submit(store(), kind or KINDS[0], {"scenario": yaml_text, **spec}))
        st.rerun()


def _own_yaml(t: Translate) -> str:
    uploaded = st.file_uploader(t("live.upload"), type=["yaml", "yml"], max_upload_size=UPLOAD_MB)
    if uploaded is not None:
        return uploaded.getvalue().decode("utf-8", errors="replace")
    return st.text_area(
        t("live.paste"),
        height=260,
        key="draft_live",
        persist_state="session",
        placeholder=shipped_scenarios()[FIRST],
    )


def _checked(yaml_text: str, own: bool, kind: str, t: Translate) -> Scenario | None:
    """The scenario with its summary, or the sentence that says what is wrong with it."""
    if not yaml_text.strip():
        st.caption(t("live.empty_draft"))
        return None
    try:
        scenario = scenario_of_page(yaml_text, store()) if own else scenario_of({"scenario": yaml_text})
    except MemboundError as error:
        states.problem(str(error), t("live.fix_yaml"))
        return None
    st.markdown(_summary(scenario, kind, t))
    with st.expander(t("live.show_yaml")):
        st.code(yaml_text, language="yaml")
    return scenario


def _summary(scenario: Scenario, kind: str, t: Translate) -> str:
    titles = t("sign.list").join(technique_title(variant.name, t) for variant in scenario.compared())
    techniques = text.plain(titles) or t("live.no_techniques")
    arrivals = scenario.workload.arrivals.model_dump()
    arriving = arrivals.pop("kind")
    said = t(
        "live.summary",
        model=text.plain(scenario.model),
        weights=t(f"live.weights_{scenario.weights}") if scenario.weights in MADE else text.plain(scenario.weights),
        hardware=text.plain(device_title(scenario.hardware, t)),
        techniques=techniques,
        arrivals=t(f"arrivals.{arriving}", **arrivals),
        requests=scenario.workload.requests,
    )
    if kind != "compare":  # the others run once, at the scenario's own point
        return said
    return f"{said} · {t('live.cells', points=len(list(scenario.points())), repeats=scenario.repeats)}"


def _shown(t: Translate) -> None:
    job_id, run_id = shown_job(), shown_run()
    if job_id is None and run_id is None:
        return
    try:
        with st.container(border=True):
            if job_id is not None:
                name = history.scenario_name(store().job(job_id))
                _headed(name, job_id, t)
                _job(job_id)
            elif run_id is not None:
                run = store().run(run_id)
                _headed(run.label, run_id, t)
                results.outcome(run.comparison() or {"summary": run.summary}, run.scenario_yaml(), run_id)
    except StoreError as error:
        states.problem(str(error), t("live.no_job"))


def _headed(name: str, number: str, t: Translate) -> None:
    """What is shown, by its name; its number for who looks for it in the store."""
    st.header(text.plain(name), anchor="run", help=t("live.job", job=number))


def _job(job_id: str) -> None:
    job = console(job_id)
    if job.state == "done" and job.kind == "calibrate":
        st.success(translate()("live.calibrated"), icon=":material/straighten:")
    elif job.state == "done":
        results.outcome(job.result or {}, job.spec.get("scenario", ""), job_id)
    elif not job.active:
        states.ended_badly(job)
