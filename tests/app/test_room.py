"""Do answers that nobody looks at make room, and does everything else stay?"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from membound.app.room import ANSWERS, looked_at, make_room
from membound.app.store import Store

DAY_S = 86400.0


def answer(store: Store, kind: str, label: str, days: float, state: str = "done", by_job: bool = True) -> str:
    """A kept answer that was looked at so many days ago."""
    job_id = None
    if by_job:
        job_id = store.submit_job(kind, {"digest": label})
        store.start_job(job_id)
        store.job_log_path(job_id).parent.mkdir(parents=True)
        store.job_log_path(job_id).write_text("log")
    run_id = store.save_run(
        kind=kind, label=label, digest=f"{label}-{days}", scenario_yaml="", summary={}, comparison={}, job_id=job_id
    )
    if job_id is not None and state == "done":
        store.finish_job(job_id, "done", result={"run_id": run_id})
    then = time.time() - days * DAY_S
    os.utime(store.run(run_id).folder, (then, then))
    return run_id


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_nobody_looked_at_goes_with_its_files_and_its_log(store: Store, kind: str) -> None:
    label = "0" * 16 if kind == "validate" else "plan"
    old, new = answer(store, kind, label, 91), answer(store, kind, label, 89)
    job_id = store.run(old).job_id
    assert job_id is not None
    assert make_room(store) == [old]
    assert [run.id for run in store.runs()] == [new]
    assert not (store.runs_folder / old).exists() and not store.job_log_path(job_id).exists()
    assert store.job(job_id).state == "done", "who asked still finds that it was answered"


def test_of_many_those_looked_at_last_stay(store: Store) -> None:
    ids = [answer(store, "stack", "stack", days) for days in (5, 2, 9, 3)]
    looked_at(store.run(ids[2]))
    assert set(make_room(store, most=2)) == {ids[0], ids[3]}


def test_what_a_page_may_still_show_stays_however_many_there_are(store: Store) -> None:
    for _ in range(3):
        answer(store, "stack", "stack", 0.1)
    assert make_room(store, most=1) == [] and len(store.runs()) == 3


def test_what_a_person_named_or_ran_or_brought_stays(store: Store) -> None:
    kept = [
        answer(store, "policies", "our-cluster", 900),
        answer(store, "max_rate", "our-cluster", 900),
        answer(store, "compare", "live-cpu", 900),
        answer(store, "measure", "live-cpu", 900),
        answer(store, "simulate", "simulate", 900),
        answer(store, "experiment", "x1", 900),
        answer(store, "plan", "plan", 900, by_job=False),
        answer(store, "plan", "plan", 900, state="running"),
    ]
    shipped = answer(store, "policies", "cluster-failover", 900)
    assert make_room(store, most=0) == [shipped]
    assert {run.id for run in store.runs()} == set(kept)


def test_two_that_make_room_at_once_do_not_disturb_each_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = answer(store, "stack", "stack", 100), answer(store, "stack", "stack", 200)
    listed = store.runs("stack")
    Store(store.home).delete_run(first)
    monkeypatch.setattr(store, "runs", lambda kind: listed if kind == "stack" else [])
    assert make_room(store) == [second]
