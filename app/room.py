"""Which answers of pages make room for newer ones, so that a store that many people ask does not grow for ever?

An answer can be had again by asking again. What was measured, what a person named and the history's runs are kept.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress

from membound.app import uploads
from membound.app.home import StoreError
from membound.app.records import Run
from membound.app.store import Store
from membound.roofline.scenario import shipped_scenarios

# Kinds of runs that only hold the answer to a page's question; experiments measure, so they are not among them.
ANSWERS = ("max_rate", "plan", "policies", "stack", "validate")
# Scenarios that pages make of their forms have these names.
FORMS = frozenset({"plan", "simulate", "stack"})
MOST_ANSWERS = 500
MOST_DAYS = 90.0
# A page that is open may still read an answer that it showed so many days ago.
LEAST_DAYS = 1.0
_DAY_S = 86400.0


def looked_at(run: Run) -> None:
    """Notes that somebody sees an answer: those that nobody looks at any more go first."""
    with suppress(OSError):  # a disk that cannot be written to does not hide an answer
        os.utime(run.folder)


def make_room(store: Store, most: int = MOST_ANSWERS, days: float = MOST_DAYS) -> list[str]:
    """Deletes the answers that nobody looked at for so many days, and all but the `most` looked at last.

    Returns the ids of what was deleted, with which the logs of their jobs go, and old uploads that only they named.
    Several processes may do so at once.
    """
    answers = [run for kind in ANSWERS for run in store.runs(kind)]
    active = {job.id for job in store.jobs(active=True)}
    now = time.time()
    aged = [(now - _seen(run, now), run) for run in answers if not is_kept(run) and run.job_id not in active]
    aged.sort(key=lambda item: item[0])
    deleted = []
    for place, (age_s, run) in enumerate(aged):
        if age_s > days * _DAY_S or (place >= most and age_s > LEAST_DAYS * _DAY_S):
            with suppress(StoreError):  # another process was faster
                store.delete_run(run.id)
                deleted.append(run.id)
                assert run.job_id is not None, "what came by no job is kept"
                shutil.rmtree(store.job_log_path(run.job_id).parent, ignore_errors=True)
    uploads.remove_unused(store)
    return deleted


def is_kept(run: Run) -> bool:
    """Whether an answer stays whatever its age: a person named its scenario, or it came here by no job."""
    names_nothing = run.kind == "validate" or run.label in FORMS or run.label in shipped_scenarios()
    return run.job_id is None or not names_nothing


def _seen(run: Run, now: float) -> float:
    try:
        return run.folder.stat().st_mtime
    except OSError:  # deleted meanwhile
        return now
