"""What does a person see of a job while it runs: progress, the text being written, a way to stop it?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from membound.app import feed, jobs, text
from membound.app.busy import usable_cores
from membound.app.figures import comparison
from membound.app.figures.live import SERIES, live_figure
from membound.app.i18n import Translate
from membound.app.news import busy_said, progress_said
from membound.app.plot import describe
from membound.app.records import Event, Job
from membound.app.views import results, tables
from membound.app.views.charts import chart
from membound.app.views.session import language, store, this_machine, translate
from membound.app.worker import MEASUREMENTS
from membound.roofline.results.comparison import Comparison

POLL_S = 0.5
# A run on the CPU is being timed while a page looks at it, and where cores are few they are the run's own. What a look
# costs is counted by `tests/bench/dashboard_speed.py live`.
POLL_BESIDE_CPU_S, POLL_ON_FEW_CORES_S, FEW_CORES = 1.0, 3.0, 2
TEXT_HEIGHT = 320


def console(job_id: str, *, watch_text: bool = True) -> Job:
    """Draw a job and, while it is active, show how it goes on; the page runs anew once it has ended."""
    job = jobs.poll(store(), job_id)
    if job.active:
        every_s = None if feed.is_served() else _poll_s(job)
        st.fragment(_running, run_every=every_s, key=f"console_{job_id}")(job_id, watch_text)
    return job


def _poll_s(job: Job) -> float:
    machine = this_machine()
    on_cpu = machine is None or machine.kind == "cpu"
    if not (on_cpu and job.kind in MEASUREMENTS):
        return POLL_S
    return POLL_ON_FEW_CORES_S if usable_cores() <= FEW_CORES else POLL_BESIDE_CPU_S


def _running(job_id: str, watch_text: bool) -> None:
    t = translate()
    job = jobs.poll(store(), job_id)
    if not job.active:
        st.rerun()
    watched = _watched(job)
    heard = feed.feed_of(job_id, watched.seq, _poll_s(job), language())
    left, right = st.columns([6, 1], vertical_alignment="bottom")
    with left:
        words, warning = progress_said(job, t), busy_said(job, t)
        if feed.is_served():
            known = {"progress": job.progress, "words": words, "warning": warning}
            feed.progress(job_id, known, heard, _noted, awaited=watch_text and not watched.points)
        else:
            st.progress(job.progress, text.plain(words))
    with right:
        stopping = job.cancel_requested is not None
        label = t("job.cancelling") if stopping else t("job.cancel")
        if st.button(label, key=f"cancel_{job_id}", disabled=stopping, width="stretch"):
            jobs.cancel(store(), job_id)
            st.rerun(scope="fragment")
    if warning is not None and not feed.is_served():
        st.warning(warning, icon=":material/hourglass:")
    if not watch_text:
        return
    rows = results.rows_of(watched.rows)
    answered = any(row.measured is not None for row in rows)
    if answered:  # what was asked comes before how it comes about
        _rows(job, rows)
    if watched.points:
        _live(job, watched, heard)
    if not answered:
        _rows(job, rows)


def _noted() -> None:
    """A part of the page has heard of something that the page draws itself: it runs, and Streamlit wants to call
    something."""


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


def _live(job: Job, watched: Watched, heard: dict[str, Any]) -> None:
    t = translate()
    left, right = st.columns([3, 2], gap="medium")
    with left:
        figure = live_figure(watched.points, t)
        table = tables.live_table(watched.points, t)
        grows = heard | {"series": list(SERIES)}
        chart(figure, key=f"live_{job.id}", alt=describe(figure), table=table, keeps_zoom=True, feed=grows)
    with right:
        st.markdown(t("live.text"))
        if feed.is_served():
            words = {"title": t("live.text"), "request": t("live.request", request="%"), "none": t("live.no_text")}
            feed.written(job.id, watched.written, words, heard, TEXT_HEIGHT)
        else:
            _written(watched.written, t)


def _rows(job: Job, rows: Sequence[Comparison]) -> None:
    """What the run has predicted and measured so far."""
    t = translate()
    gains = [row for row in rows if row.technique != "baseline"]
    if gains:
        st.markdown(t("live.rows"))
        alt = comparison.alt_text(rows, t)
        chart(comparison.gains_figure(rows, t), key=f"rows_{job.id}", alt=alt, table=tables.gains_table(gains, t))


def _written(text_so_far: dict[str, Any] | None, t: Translate) -> None:
    with st.container(height=TEXT_HEIGHT, border=True, autoscroll=True):
        if text_so_far is None:
            st.caption(t("live.no_text"))
        else:
            st.caption(t("live.request", request=text_so_far["request"]))
            st.text(f"{text_so_far['prompt']}{text_so_far['text']}▌")
