"""What belongs to this browser session: its language, and how it reaches what all sessions share?"""

from __future__ import annotations

import importlib.util

import streamlit as st

from membound.app.home import membound_home
from membound.app.i18n import LANGUAGES, Translate, language_of
from membound.app.store import Store
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, local_hardware

JOB, RUN = "job", "run"


def language() -> str:
    """The language that this session chose, else its browser's."""
    chosen = st.session_state.get("lang") or st.query_params.get("lang")
    return chosen if chosen in LANGUAGES else language_of(st.context.locale)


def translate() -> Translate:
    """The `t` of this session's language."""
    return Translate(language())


def store() -> Store:
    """The store that all sessions share; it opens a connection per call."""
    return Store(membound_home())


def this_machine() -> HardwareSpec | None:
    """This machine if it was calibrated."""
    try:
        return local_hardware()
    except MemboundError:
        return None


def device_name(device: HardwareSpec, t: Translate) -> str:
    """A device as the page calls it."""
    return t("device.local") if device.name == "local" else device.name


def has_torch() -> bool:
    """Whether this installation can measure, found out without importing torch."""
    return importlib.util.find_spec("torch") is not None


def shown_job() -> str | None:
    """The job that the URL names."""
    return st.query_params.get(JOB)


def shown_run() -> str | None:
    """The run without a job, such as one of the command line, that the URL names."""
    return st.query_params.get(RUN)


def show_job(job_id: str) -> None:
    """Put a job into the URL, so that a reload finds the same page."""
    st.query_params.pop(RUN, None)
    st.query_params[JOB] = job_id


def show_run(run_id: str) -> None:
    """Put a run into the URL in the place of a job."""
    st.query_params.pop(JOB, None)
    st.query_params[RUN] = run_id
