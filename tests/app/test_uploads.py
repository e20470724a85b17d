"""Do uploads go when nobody needs them any more, and only then?"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from membound.app import uploads
from membound.app.room import make_room
from membound.app.store import Store
from membound.roofline.errors import MemboundError

DAY_S = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def _uploaded(store: Store, **days: float) -> tuple[str, ...]:
    """Uploads by their content, each last asked for so many days ago."""
    digests = tuple(uploads.keep(store, content.encode()) for content in days)
    for digest, age in zip(digests, days.values(), strict=True):
        then = time.time() - age * DAY_S
        os.utime(store.home / "uploads" / digest, (then, then))
    return digests


def _there(store: Store) -> set[str]:
    return {path.name for path in (store.home / "uploads").iterdir()}


def _run(store: Store, kind: str, label: str, scenario: str = "", job_id: str | None = None) -> str:
    return store.save_run(
        kind=kind, label=label, digest=label, scenario_yaml=scenario, summary={}, comparison={}, job_id=job_id
    )


def _trace(store: Store, digest: str) -> str:
    return f"workload:\n  arrivals: {{kind: trace, file: {store.home / 'uploads' / digest}}}\n"


def test_what_nobody_names_goes_after_a_time(store: Store) -> None:
    old, young = _uploaded(store, old=uploads.MOST_DAYS + 1, young=uploads.MOST_DAYS - 1)
    assert uploads.remove_unused(store) == [old] and _there(store) == {young}
    with pytest.raises(MemboundError, match="upload it again"):
        uploads.find(store, old)


def test_what_a_kept_run_or_an_active_job_names_stays(store: Store) -> None:
    trace, table, waiting, asked, gone = _uploaded(store, a=400, b=400, c=400, d=400, e=400)
    _run(store, "simulate", "mine", _trace(store, trace))
    _run(store, "validate", table)
    store.submit_job("policies", {"scenario": _trace(store, waiting)})
    store.submit_job("validate", {"table": asked})
    ended = store.submit_job("validate", {"table": gone})
    store.finish_job(ended, "failed", error="no table")
    assert uploads.remove_unused(store) == [gone]
    assert _there(store) == {trace, table, waiting, asked}


def test_an_upload_goes_with_the_last_answer_that_named_it(store: Store) -> None:
    (digest,) = _uploaded(store, trace=400)
    job_id = store.submit_job("policies", {})
    run_id = _run(store, "policies", "simulate", _trace(store, digest), job_id)
    store.finish_job(job_id, "done", result={"run_id": run_id})
    assert make_room(store) == [] and _there(store) == {digest}
    then = time.time() - 400 * DAY_S
    os.utime(store.run(run_id).folder, (then, then))
    assert make_room(store) == [run_id] and _there(store) == set()


def test_what_is_asked_for_or_uploaded_again_is_young_again(store: Store) -> None:
    found, again = _uploaded(store, found=400, again=400)
    uploads.find(store, found)
    uploads.keep(store, b"again")
    assert uploads.remove_unused(store) == [] and _there(store) == {found, again}


def test_a_new_upload_makes_room(store: Store) -> None:
    _uploaded(store, old=400)
    (store.home / "uploads" / "0123456789abcdef.draft").write_bytes(b"half")
    os.utime(store.home / "uploads" / "0123456789abcdef.draft", (0, 0))
    new = uploads.keep(store, b"new")
    assert _there(store) == {new}


def test_no_run_is_read_where_nothing_is_old(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _uploaded(store, young=1)
    monkeypatch.setattr(store, "runs", lambda: pytest.fail("the runs were read"))
    assert uploads.remove_unused(store) == []


def test_a_store_without_uploads_has_nothing_to_remove(store: Store) -> None:
    assert uploads.remove_unused(store) == []
