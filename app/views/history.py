"""Which runs were there? Shared by all sessions of this machine."""

from __future__ import annotations

import time

import streamlit as st

from membound.app import jobs, text
from membound.app.store import Job
from membound.app.views.session import show_job, shown_job, store, translate

SHOWN = 12
STATE_MARKS = {"queued": "⏳", "running": "▶", "done": "✓", "cancelled": "⏹", "failed": "✕", "lost": "✕"}


def history() -> None:
    """The newest jobs with a button that opens each."""
    t = translate()
    st.subheader(t("history.title"))
    found = [job for job in store().jobs(limit=SHOWN) if job.kind != "calibrate"]
    if not found:
        st.info(t("history.empty"), icon=":material/history:")
    for job in found:
        _entry(jobs.poll(store(), job.id) if job.active else job)


def _entry(job: Job) -> None:
    t = translate()
    when, what, state, action = st.columns([2, 4, 2, 1], vertical_alignment="center")
    when.text(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.created)))
    first_line = job.spec.get("scenario", "").partition("\n")[0]
    what.text(f"{t(f'kind.{job.kind}')} · {first_line.removeprefix('name: ')}")
    took = "" if not job.finished or not job.started else f" · {text.seconds(job.finished - job.started)}"
    state.text(f"{STATE_MARKS[job.state]} {t(f'state.{job.state}')}{took}")
    if job.id == shown_job():
        action.caption(t("history.shown"))
    else:
        action.button(t("history.open"), key=f"open_{job.id}", on_click=show_job, args=(job.id,))
