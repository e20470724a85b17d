"""What does a person see of a job while it runs: progress, the text being written, a way to stop it?"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from membound.app import jobs, text
from membound.app.busy import load_of_others, usable_cores
from membound.app.figures.live import live_figure
from membound.app.i18n import Translate
from membound.app.plot import describe
from membound.app.store import Event, Job
from membound.app.views import results, tables
from membound.app.views.charts import chart
from membound.app.views.said import said
from membound.app.views.session import store, this_machine, translate
from membound.app.worker import MEASUREMENTS

POLL_S = 0.5
# Server and browser take 0.36 of a core for an open page at 0.5 s, and 0.10 at 3 s (`tests/bench/dashboard_speed.py
# live`), and a CPU run is being timed meanwhile.
POLL_BESIDE_CPU_S = 3.0
TEXT_HEIGHT = 320
# Before this progress what is left is a guess: loading torch and compiling kernels count as none.
EVEN_FROM = 0.05


def console(job_id: str, *, watch_text: bool = True) -> Job:
    """Draw a job and, while it is active, draw it again as it goes on; the page runs anew once it has ended."""
    job = jobs.poll(store(), job_id)
    if job.active:
        st.fragment(_running, run_every=_poll_s(job), key=f"console_{job_id}")(job_id, watch_text)
    return job


def _poll_s(job: Job) -> float:
    machine = this_machine()
    on_cpu = machine is None or machine.kind == "cpu"
    return POLL_BESIDE_CPU_S if on_cpu and job.kind in MEASUREMENTS else POLL_S


def _running(job_id: str, watch_text: bool) -> None:
    t = translate()
    job = jobs.poll(store(), job_id)
    if not job.active:
        st.rerun()
    left, right = st.columns([6, 1], vertical_alignment="bottom")
    with left:
        st.progress(job.progress, _progress_said(job, t))
    with right:
        stopping = job.cancel_requested is not None
        label = t("job.cancelling") if stopping else t("job.cancel")
        if st.button(label, key=f"cancel_{job_id}", disabled=stopping, width="stretch"):
            jobs.cancel(store(), job_id)
            st.rerun(scope="fragment")
    if job.kind == "calibrate" and (load := load_of_others()) is not None:
        st.warning(t("job.busy", load=f"{load:.1f}", cores=usable_cores()), icon=":material/hourglass:")
    if watch_text:
        _live(job)


def _progress_said(job: Job, t: Translate) -> str:
    """What a job does and for how long; of a calibration, whose progress is even, also how long it still takes."""
    waited_s = max(0.0, time.time() - (job.started or job.created))
    words = {"message": text.plain(said(job.message, t)), "waited": text.seconds(waited_s)}
    if job.kind != "calibrate" or job.state != "running" or job.progress < EVEN_FROM:
        return t(f"job.{job.state}", **words)
    return t("job.left", **words, left=text.seconds(waited_s * (1.0 / job.progress - 1.0)))


@dataclass
class Watched:
    """What a session has seen of a job so far, so that a poll reads only what is new."""

    seq: int = 0
    points: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, Any] | None = None

    def update(self, events: Iterable[Event], started: float) -> None:
        for event in events:
            self.seq = event.seq
            if event.kind == "live":
                self.points.append((event.t - started, event.payload))
            elif event.kind == "row":
                self.rows.append(event.payload)
            elif event.kind == "text":
                self.written = event.payload


def _watched(job: Job) -> Watched:
    watched: Watched = st.session_state.setdefault(f"watched_{job.id}", Watched())
    watched.update(store().events(job.id, watched.seq), job.started or job.created)
    return watched


def _live(job: Job) -> None:
    t = translate()
    watched = _watched(job)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        figure = live_figure(watched.points, t)
        table = tables.live_table(watched.points, t)
        chart(figure, key=f"live_{job.id}", alt=describe(figure), table=table, keeps_zoom=True)
    with right:
        st.markdown(t("live.text"))
        with st.container(height=TEXT_HEIGHT, border=True, autoscroll=True):
            if watched.written is None:
                st.caption(t("live.no_text"))
            else:
                st.caption(t("live.request", request=watched.written["request"]))
                st.text(f"{watched.written['prompt']}{watched.written['text']}▌")
    gains = [row for row in results.rows_of(watched.rows) if row.technique != "baseline"]
    if gains:
        st.markdown(t("live.rows"))
        st.dataframe(tables.gains_table(gains, t), hide_index=True)
