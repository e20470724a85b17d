"""How does a page get an answer that takes long? From the store if somebody asked the same before, else from a job.

The question's digest is the key: the URL holds the choices, they make the question, and the question finds its answer
or the job that works on it, after a reload, in a second tab and after a restart of the server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import streamlit as st

from membound.app import jobs, room
from membound.app.answering import digest_of
from membound.app.records import Job, Run
from membound.app.views import states
from membound.app.views.console import console
from membound.app.views.session import store, translate

# Jobs of a kind that are looked through for the one that works on a question.
LOOKED_AT = 30


def answer(kind: str, spec: Mapping[str, Any], label: str, *, start: bool = False) -> Run | None:
    """The newest answer to the question `spec`, below a button that asks and what is known of the job.

    With `start` the question is asked at once where nobody has asked it yet.
    """
    t = translate()
    digest = digest_of(kind, spec)
    known = store().runs(kind=kind, digest=digest, limit=1)
    job = _job(kind, digest)
    unknown = job is None or job.state == "done"  # its answer made room for others
    if unknown and not known and start:
        job = _submit(kind, spec, digest)
    active = job is not None and job.active
    if not active:
        row = f"form_{'known' if known else 'asks'}_{kind}"
        with st.container(horizontal=True, vertical_alignment="center", key=row):
            pressed = st.button(
                t("asked.again") if known else label,
                key=f"ask_{kind}",
                type="secondary" if known else "primary",
            )
            if known:
                made = time.strftime("%Y-%m-%d %H:%M", time.localtime(known[0].created))
                st.caption(t("asked.made", when=made))
        if pressed:
            _submit(kind, spec, digest)
            st.rerun()
    if known:
        room.looked_at(known[0])
    if job is not None and active:
        console(job.id, watch_text=False)
    elif job is not None and job.state != "done" and not (known and known[0].created > job.created):
        states.ended_badly(job)
    return known[0] if known else None


def _job(kind: str, digest: str) -> Job | None:
    """The newest job that was asked this."""
    for job in store().jobs(kind, limit=LOOKED_AT):
        if job.spec.get("digest") == digest:
            return jobs.poll(store(), job.id)
    return None


def _submit(kind: str, spec: Mapping[str, Any], digest: str) -> Job:
    return store().job(jobs.submit(store(), kind, {**spec, "digest": digest}))
