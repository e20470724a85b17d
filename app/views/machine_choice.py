"""On which machine is a scenario measured: this CPU, this GPU, or a server that the person names?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import streamlit as st

from membound.app import jobs, served
from membound.app.i18n import Translate
from membound.app.text import percent, plain
from membound.app.views import linked, states
from membound.app.views.console import console
from membound.app.views.devices import device_names, device_title, has_gpu
from membound.app.views.said import said
from membound.app.views.session import has_torch, show_job, shown_job, store, this_machine
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import LOCAL_GPU, is_local
from membound.roofline.scenario import Scenario

CPU, GPU, ENDPOINT = "cpu", "gpu", "endpoint"
TORCH_DEVICE = {CPU: "cpu", GPU: "cuda"}
AS_GIVEN = ""


@dataclass(frozen=True)
class Chosen:
    """The scenario as this machine is to run it, what a job must know beside it, and whether it can run."""

    scenario: Scenario
    spec: dict[str, Any]
    ready: bool


def choose_machine(scenario: Scenario, kind: str, t: Translate) -> Chosen:
    """The machine that the widgets hold, below them whatever is missing for it."""
    shown = [CPU, GPU, ENDPOINT] if has_gpu() else [CPU, ENDPOINT]
    default = _calibrated() or CPU
    linked.seed("machine", linked.one_of(shown), default)
    machine = st.segmented_control(
        t("live.machine"),
        shown,
        key="machine",
        required=True,
        wrap=True,
        persist_state="session",
        format_func=lambda name: t(f"live.machine_{name}"),
        help=t("live.machine_help"),
    )
    linked.keep("machine", default)
    if machine == ENDPOINT:
        return _endpoint(scenario, kind, t)
    return Chosen(scenario, {}, _here(scenario, machine or default, t))


def _calibrated() -> str | None:
    """Which part of this machine was measured, None for neither."""
    machine = this_machine()
    return None if machine is None else (GPU if machine.kind == "gpu" else CPU)


def _here(scenario: Scenario, machine: str, t: Translate) -> bool:
    """Whether the scenario can be measured on this CPU or GPU; if not, the reason and the next step."""
    if not is_local(scenario.hardware):
        st.warning(t("live.for_other", hardware=plain(scenario.hardware)), icon=":material/swap_horiz:")
        return False
    if scenario.hardware == LOCAL_GPU and machine == CPU:
        st.warning(t("live.for_gpu"), icon=":material/swap_horiz:")
        return False
    if not has_torch():
        return False  # the page says so at its top
    calibrated = _calibrated()
    if calibrated == machine:
        return True
    if _calibrating(t):
        return False
    words = "live.not_calibrated" if calibrated is None else f"live.calibrated_{calibrated}"
    st.warning(t(words, machine=t(f"live.machine_{machine}")), icon=":material/straighten:")
    if st.button(t("live.calibrate", machine=t(f"live.machine_{machine}")), key="calibrate"):
        show_job(jobs.submit(store(), "calibrate", {"device": TORCH_DEVICE[machine]}))
        st.rerun()
    return False


def can_simulate(scenario: Scenario, t: Translate) -> bool:
    """Whether the device of the scenario is known; if not, the reason and the next step."""
    calibrated = _calibrated()
    wanted = GPU if scenario.hardware == LOCAL_GPU else None
    if not is_local(scenario.hardware) or (calibrated is not None and wanted in (None, calibrated)):
        return True
    words = "live.simulate_uncalibrated" if calibrated is None else "live.simulate_other"
    st.warning(t(words, hardware=plain(scenario.hardware)), icon=":material/straighten:")
    return False


def _calibrating(t: Translate) -> bool:
    """Whether this machine is being calibrated; how far that is stands here, where the page does not show it."""
    for newest in store().jobs("calibrate", limit=1, active=True):
        job = jobs.poll(store(), newest.id)
        if job.active:
            st.info(t("live.calibrating", progress=percent(job.progress)), icon=":material/straighten:")
            if job.id != shown_job():
                console(job.id, watch_text=False)
            return True
    return False


def _endpoint(scenario: Scenario, kind: str, t: Translate) -> Chosen:
    left, middle, right = st.columns([3, 2, 2])
    with left:
        url = _words("endpoint", t("live.endpoint"), t("live.endpoint_help"), "http://127.0.0.1:8000")
        linked.keep("endpoint", "")
    with middle:
        model = _words("served", t("live.served"), t("live.served_help"), "")
        linked.keep("served", "")
    with right:
        # Not in the URL: a link that somebody sends must not choose which secret goes where.
        key_env = st.text_input(
            t("live.key_env"),
            key="key_env",
            persist_state="session",
            max_chars=served.MOST_CHARACTERS,
            placeholder=f"{served.KEY_PREFIX}_VLLM",
            help=t("live.key_env_help", prefix=served.KEY_PREFIX),
        )
    taken_for = _taken_for(scenario, t) if kind == "compare" else AS_GIVEN
    if taken_for != AS_GIVEN:
        scenario = scenario.model_copy(update={"hardware": taken_for})
    asked = {"url": url.strip(), "model": model.strip(), "key_env": (key_env or "").strip()}
    if not asked["url"]:
        st.caption(t("live.endpoint_empty"))
        return Chosen(scenario, {}, False)
    try:
        served.endpoint_of(asked)
    except MemboundError as error:
        states.problem(said(str(error), t), t("live.endpoint_fix"))
        return Chosen(scenario, {}, False)
    if kind == "compare" and is_local(scenario.hardware) and this_machine() is None:
        st.warning(t("live.taken_for_unknown"), icon=":material/straighten:")
        return Chosen(scenario, {}, False)
    return Chosen(scenario, {"endpoint": {name: value for name, value in asked.items() if value}}, True)


def _words(key: str, label: str, explained: str, example: str) -> str:
    linked.seed(key, lambda held: str(held)[: served.MOST_CHARACTERS], "")
    value = st.text_input(
        label,
        key=key,
        persist_state="session",
        max_chars=served.MOST_CHARACTERS,
        placeholder=example,
        help=explained,
    )
    return value or ""


def _taken_for(scenario: Scenario, t: Translate) -> str:
    """The device that the server's times are predicted for; empty for the scenario's own."""
    names = [AS_GIVEN, *device_names()]
    linked.seed("taken", linked.one_of(names), AS_GIVEN)
    name = st.selectbox(
        t("live.taken_for"),
        names,
        key="taken",
        persist_state="session",
        format_func=lambda name: _titled(name, scenario, t),
        help=t("live.taken_for_help"),
    )
    linked.keep("taken", AS_GIVEN)
    return name or AS_GIVEN


def _titled(name: str, scenario: Scenario, t: Translate) -> str:
    if name == AS_GIVEN:
        return t("live.taken_as_given", hardware=scenario.hardware)
    return device_title(name, t)
