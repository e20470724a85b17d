"""What does a page say when there is nothing yet, when something failed, or when a part is missing?"""

from __future__ import annotations

import streamlit as st

from membound.app.records import Job
from membound.app.text import plain
from membound.app.views.said import said
from membound.app.views.session import translate


def problem(what: str, advice: str) -> None:
    """An error: what happened and why in the words of who noticed it, then what to do."""
    st.error(plain(said(what, translate())), icon=":material/error:")
    st.caption(advice)


def ended_badly(job: Job) -> None:
    """A job that failed, was lost or was cancelled."""
    t = translate()
    if job.state == "cancelled":
        st.info(t("job.cancelled"), icon=":material/stop_circle:")
        return
    sentence, _, log = (job.error or t("job.no_reason")).partition("\n")
    problem(sentence, t(f"job.{job.state}_advice", job=job.id))
    if log:
        with st.expander(t("job.log")):
            st.code(log, language=None)


def no_torch() -> None:
    """Measuring is not possible in this installation; everything that predicts is."""
    t = translate()
    st.info(t("state.no_torch"), icon=":material/extension:")
    st.code("make setup TORCH=cpu", language="bash")
