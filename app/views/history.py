"""Which runs were there? Shared by all sessions of this machine, and with its command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import streamlit as st

from membound.app import jobs, text
from membound.app.i18n import Translate
from membound.app.records import Job, Run
from membound.app.views import linked
from membound.app.views.results import made_by
from membound.app.views.session import show_job, show_run, shown_job, shown_run, store, translate
from membound.app.views.two_runs import two_runs_chosen
from membound.roofline.errors import MemboundError
from membound.roofline.reading.plain_yaml import parse_yaml

SHOWN, MOST_LINES = 12, 400
LINES = "lines"
KINDS = ("compare", "measure", "simulate")
STATE_MARKS = {"queued": "…", "running": "▶", "done": "✓", "cancelled": "■", "failed": "✕", "lost": "✕"}


@dataclass(frozen=True)
class Entry:
    """One line of the history and what opens it."""

    id: str
    created: float
    name: str
    kind: str
    state: str
    shown: bool
    show: Callable[[str], None]


def history() -> None:
    """The newest runs and the jobs that gave none, with a button that opens each; below them, any two compared."""
    t = translate()
    st.header(t("history.title"), anchor="history")
    lines = linked.seed(LINES, _lines, SHOWN)
    runs = store().runs(KINDS, limit=lines + 1)
    took = store().seconds_of_jobs([run.job_id for run in runs if run.job_id is not None])
    waiting = [jobs.poll(store(), job.id) for job in store().jobs(KINDS, lines + 1, unfinished=True)]
    found = [_run(run, took, t) for run in runs] + [_job(job, t) for job in waiting if job.state != "done"]
    found.sort(key=lambda entry: entry.created, reverse=True)
    if not found:
        st.info(t("history.empty"), icon=":material/history:")
        return
    for entry in found[:lines]:
        _line(entry, t)
    if len(found) > lines and lines < MOST_LINES:
        st.button(t("history.more"), key="more", on_click=_show_more, args=(lines,))
    linked.keep(LINES, SHOWN)
    two_runs_chosen(KINDS)


def _lines(held: object) -> int | None:
    """How many lines the URL asks for."""
    number = int(str(held)) if str(held).isdecimal() else 0
    return min(number, MOST_LINES) if number > 0 else None


def _show_more(lines: int) -> None:
    st.session_state[LINES] = min(2 * lines, MOST_LINES)


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
    kind = t(f"kind.{job.kind}")
    return Entry(job.id, job.created, scenario_name(job), kind, state, job.id == shown_job(), show_job)


def _run(run: Run, took: Mapping[str, float], t: Translate) -> Entry:
    seconds = took.get(run.job_id or "")
    words = t("state.from_command") if run.job_id is None else t("state.done")
    state = f"{STATE_MARKS['done']} {words}" + ("" if seconds is None else f" · {text.seconds(seconds)}")
    kind = f"{t(f'kind.{run.kind}')} · {made_by(run)}"
    shown = run.id == shown_run() or (run.job_id is not None and run.job_id == shown_job())
    return Entry(run.id, run.created, run.label, kind, state, shown, show_run)


def _line(entry: Entry, t: Translate) -> None:
    said, action = st.columns([8, 1], vertical_alignment="center")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
    below = text.plain(" · ".join((when, entry.kind, entry.state)))
    with said.container(gap=None):
        st.markdown(f"**{text.plain(entry.name)}**")
        st.caption(below)
    if entry.shown:
        action.caption(t("history.shown"))
    else:
        action.button(t("history.open"), key=f"open_{entry.id}", on_click=entry.show, args=(entry.id,))
