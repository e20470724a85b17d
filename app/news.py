"""What has happened to a job since a page last asked? Only that is sent."""

from __future__ import annotations

import time
from typing import Any

from membound.app import jobs, text
from membound.app.busy import load_of_others, usable_cores
from membound.app.figures.live import SERIES, thinned
from membound.app.i18n import Translate
from membound.app.records import Job
from membound.app.store import Store
from membound.app.views.said import in_words
from membound.app.worker import MEASUREMENTS

# Before this progress what is left is a guess: loading torch and compiling kernels count as none.
EVEN_FROM = 0.05


def news_of(store: Store, job_id: str, after: int, t: Translate) -> dict[str, Any]:
    """How far a job is, and what it told after the event `after`; raises StoreError where there is no such job.

    Of the texts that it told the newest is enough. `told_rows` is the event of the newest row, which a page draws
    itself.
    """
    job = jobs.poll(store, job_id)
    events = store.events(job_id, after)
    began = job.started or job.created
    live = [event for event in events if event.kind == "live"]
    texts = [event.payload for event in events if event.kind == "text"]
    return {
        "seq": events[-1].seq if events else after,
        "active": job.active,
        "progress": job.progress,
        "words": progress_said(job, t),
        "warning": busy_said(job, t),
        "points": [
            [event.seq, round(event.t - began, 3), *(event.payload.get(key) for key in SERIES)]
            for event in thinned(live)
        ],
        "text": texts[-1] if texts else None,
        "told_rows": max((event.seq for event in events if event.kind == "row"), default=0),
    }


def progress_said(job: Job, t: Translate) -> str:
    """What a job does and for how long; of a calibration, whose progress is even, also how long it still takes."""
    if not job.active:
        return t(f"state.{job.state}")
    waited_s = max(0.0, time.time() - (job.started or job.created))
    ready = t("job.ready" if job.kind in MEASUREMENTS else "job.begins")
    words = {"message": in_words(job.message, t) if job.message else ready, "waited": text.seconds(waited_s)}
    if job.state == "queued":
        return t("job.queued", **words) + (f"{t('sign.colon')}{words['message']}" if job.message else "")
    if job.kind != "calibrate" or job.state != "running" or job.progress < EVEN_FROM:
        return t(f"job.{job.state}", **words)
    return t("job.left", **words, left=text.seconds(waited_s * (1.0 / job.progress - 1.0)))


def busy_said(job: Job, t: Translate) -> str | None:
    """That others hold a calibration up, while they do."""
    if job.kind != "calibrate" or (load := load_of_others()) is None:
        return None
    return t("job.busy", load=f"{load:.1f}", cores=usable_cores())
