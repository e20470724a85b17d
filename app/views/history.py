"""Which runs were there? Shared by all sessions of this machine, and with its command line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import streamlit as st

from membound.app import jobs, text
from membound.app.i18n import Translate
from membound.app.store import Job, Run
from membound.app.views.results import made_by
from membound.app.views.session import show_job, show_run, shown_job, shown_run, store, translate
from membound.roofline.errors import MemboundError
from membound.roofline.reading.plain_yaml import parse_yaml

SHOWN = 12
KINDS = ("compare", "measure", "simulate")
STATE_MARKS = {"queued": "⏳", "running": "▶", "done": "✓", "cancelled": "⏹", "failed": "✕", "lost": "✕"}


@dataclass(frozen=True)
class Entry:
    """One line of the history and what opens it."""

    id: str
    created: float
    what: str
    state: str
    shown: bool
    show: Callable[[str], None]


def history() -> None:
    """The newest runs with a button that opens each."""
    t = translate()
    st.header(t("history.title"))
    found = [_job(jobs.poll(store(), job.id) if job.active else job, t) for job in store().jobs() if job.kind in KINDS]
    found += [_run(run, t) for run in store().runs(limit=SHOWN) if run.job_id is None and run.kind in KINDS]
    found.sort(key=lambda entry: entry.created, reverse=True)
    if not found:
        st.info(t("history.empty"), icon=":material/history:")
    for entry in found[:SHOWN]:
        _line(entry, t)


def scenario_name(job: Job) -> str:
    """The name that a job's scenario gives itself; empty where the text is no scenario."""
    return _named(str(job.spec.get("scenario", "")))


@lru_cache(maxsize=256)
def _named(scenario_yaml: str) -> str:
    try:
        document = parse_yaml(scenario_yaml, "the scenario")
    except MemboundError:
        return ""
    return str(document.get("name", "")) if isinstance(document, dict) else ""


def _job(job: Job, t: Translate) -> Entry:
    took = "" if not job.finished or not job.started else f" · {text.seconds(job.finished - job.started)}"
    state = f"{STATE_MARKS[job.state]} {t(f'state.{job.state}')}{took}"
    return Entry(
        job.id, job.created, f"{t(f'kind.{job.kind}')} · {scenario_name(job)}", state, job.id == shown_job(), show_job
    )


def _run(run: Run, t: Translate) -> Entry:
    state = f"{STATE_MARKS['done']} {t('state.from_command')}"
    what = f"{t(f'kind.{run.kind}')} · {run.label} · {made_by(run)}"
    return Entry(run.id, run.created, what, state, run.id == shown_run(), show_run)


def _line(entry: Entry, t: Translate) -> None:
    when, what, state, action = st.columns([2, 4, 2, 1], vertical_alignment="center")
    when.text(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created)))
    what.text(entry.what)
    state.text(entry.state)
    if entry.shown:
        action.caption(t("history.shown"))
    else:
        action.button(t("history.open"), key=f"open_{entry.id}", on_click=entry.show, args=(entry.id,))
