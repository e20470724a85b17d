"""Does the store keep what it was given, whatever happens to the process and the disk?"""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from membound.app import home as home_module
from membound.app.home import SCHEMA_VERSION, Index, StoreError, membound_home, storage_error
from membound.app.store import Store

STEPS = pd.DataFrame({"step": np.arange(5), "duration_s": np.linspace(0.1, 0.5, 5)})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def save(store: Store, label: str = "first", **changes) -> str:
    run = {
        "kind": "simulate",
        "label": label,
        "digest": "d1",
        "scenario_yaml": "model: tiny\n",
        "summary": {"tpot_s": np.float64(0.01), "ttft_s": float("nan"), "tokens": np.int64(7)},
        "tables": {"steps": STEPS},
    }
    return store.save_run(**{**run, **changes})


def assert_one_sentence(message: str, *fragments: str) -> None:
    assert "\n" not in message and message.endswith("."), message
    for fragment in fragments:
        assert fragment in message, message


def test_home_is_made_on_demand_and_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "a" / "b"))
    assert membound_home() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def test_home_under_a_file_is_refused_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(StoreError) as refusal:
        membound_home()
    assert_one_sentence(str(refusal.value), "Cannot write", str(tmp_path / "file" / "home"), "MEMBOUND_HOME")


def test_a_run_comes_back_as_it_was_saved(store):
    run_id = save(store, comparison={"rows": [1, 2]})
    run = store.run(run_id)
    assert (run.kind, run.label, run.digest) == ("simulate", "first", "d1")
    assert run.summary == {"tpot_s": 0.01, "ttft_s": None, "tokens": 7}
    assert run.scenario_yaml() == "model: tiny\n"
    assert run.comparison() == {"rows": [1, 2]}
    assert run.table_names() == ["steps"]
    pd.testing.assert_frame_equal(run.table("steps").to_pandas(), STEPS)
    assert run.table("steps", columns=["step"]).column_names == ["step"]
    assert run.log() == ""


def test_a_missing_table_names_those_there_are(store):
    run = store.run(save(store))
    with pytest.raises(StoreError, match="steps"):
        run.table("requests")


def test_runs_are_listed_newest_first_and_filtered(store):
    ids = [save(store, f"r{i}", digest=f"d{i % 2}", kind="measure" if i == 3 else "simulate") for i in range(4)]
    assert [run.id for run in store.runs()] == ids[::-1]
    assert [run.id for run in store.runs(digest="d1")] == [ids[3], ids[1]]
    assert [run.id for run in store.runs(kind="measure", limit=5)] == [ids[3]]
    assert [run.id for run in store.runs(limit=2)] == [ids[3], ids[2]]


def test_a_deleted_run_is_gone_from_index_and_disk(store):
    kept, deleted = save(store), save(store)
    store.delete_run(deleted)
    assert [run.id for run in store.runs()] == [kept]
    assert [path.name for path in store.runs_folder.iterdir()] == [kept]
    with pytest.raises(StoreError, match="There is no run"):
        store.run(deleted)
    with pytest.raises(StoreError, match="There is no run"):
        store.run("../../etc")


def test_the_log_of_the_job_goes_into_the_run(store):
    job_id = store.submit_job("simulate", {})
    store.job_log_path(job_id).parent.mkdir(parents=True)
    store.job_log_path(job_id).write_text("a line\n")
    assert store.run(save(store, job_id=job_id)).log() == "a line\n"


def test_a_missing_index_is_rebuilt_from_the_folders_with_a_note(store):
    ids = {save(store, "a"), save(store, "b")}
    store.index_path.unlink()
    (store.runs_folder / "not-a-run").mkdir()
    again = Store(store.home)
    assert {run.id for run in again.runs()} == ids
    assert again.runs()[0].summary["tokens"] == 7
    assert len(again.notes) == 1 and "2 of the runs" in again.notes[0]


def test_a_run_folder_dropped_in_is_listed(store, tmp_path):
    other = Store(tmp_path / "other")
    run_id = save(other)
    store.runs_folder.mkdir()
    shutil.copytree(other.runs_folder / run_id, store.runs_folder / run_id)
    assert [run.id for run in store.runs()] == [run_id]


def test_a_damaged_index_is_named_and_can_be_rebuilt(store):
    run_id = save(store)
    store.index_path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError) as refusal:
        store.runs()
    assert_one_sentence(str(refusal.value), str(store.index_path), "damaged", "rebuilds")
    store.index_path.rename(store.home / "damaged")
    assert [run.id for run in store.runs()] == [run_id]


def test_an_index_of_a_newer_version_is_refused(store):
    store.submit_job("simulate", {})
    connection = sqlite3.connect(store.index_path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreError) as refusal:
        store.jobs()
    assert_one_sentence(str(refusal.value), "newer membound", str(store.index_path), "update")


def test_a_job_goes_through_its_states_and_ends_once(store):
    job_id = store.submit_job("simulate", {"scenario": {"batch": 4}}, owner="tab-1")
    job = store.job(job_id)
    assert (job.state, job.spec, job.owner, job.progress) == ("queued", {"scenario": {"batch": 4}}, "tab-1", 0.0)
    store.attach_worker(job_id, 123, "456")
    assert store.start_job(job_id)
    assert not store.start_job(job_id)
    store.report(job_id, progress=(0.5, "half way"))
    assert (store.job(job_id).progress, store.job(job_id).message) == (0.5, "half way")
    assert store.finish_job(job_id, "done", result={"run": "r1"})
    assert not store.finish_job(job_id, "lost", error="too late")
    store.request_cancel(job_id)
    job = store.job(job_id)
    assert (job.state, job.result, job.error, job.progress) == ("done", {"run": "r1"}, None, 1.0)
    assert job.cancel_requested is None and job.pid == 123 and job.finished >= job.started >= job.created
    assert store.jobs(active=True) == [] and [j.id for j in store.jobs(kind="simulate")] == [job_id]


def test_an_unknown_job_is_refused(store):
    with pytest.raises(StoreError, match="There is no job 'x'"):
        store.job("x")


def test_events_are_read_after_the_last_one_seen(store):
    first, second = store.submit_job("a", {}), store.submit_job("b", {})
    store.report(first, [(1.0, "point", {"tps": np.float32(2)}), (2.0, "point", {"tps": float("inf")})])
    store.report(second, [(1.5, "note", {})])
    events = store.events(first)
    assert [(e.t, e.kind, e.payload) for e in events] == [(1.0, "point", {"tps": 2.0}), (2.0, "point", {"tps": None})]
    assert store.events(first, after_seq=events[0].seq) == events[1:]
    assert store.events(first, after_seq=events[1].seq) == []


WRITER = """
import sys
from pathlib import Path
from membound.app.store import Store
store = Store(Path(sys.argv[1]))
job = store.submit_job("simulate", {})
for i in range(40):
    store.report(job, [(float(i), "point", {"i": i})] * 5, progress=(i / 40, "writing"))
store.save_run(kind="simulate", label=job, digest="d", scenario_yaml="", summary={})
"""


def test_four_processes_write_at_once_and_nothing_is_lost(store):
    command = [sys.executable, "-P", "-c", WRITER, str(store.home)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    while any(writer.poll() is None for writer in writers):
        store.jobs()
        time.sleep(0.05)
    assert [writer.communicate()[1] for writer in writers] == [""] * 4
    assert [len(store.events(job.id)) for job in store.jobs()] == [200] * 4
    assert len(store.runs()) == 4


def test_threads_of_one_server_share_a_store(store):
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda i: store.submit_job("simulate", {"i": i}), range(32)))
    assert {job.id for job in store.jobs()} == set(ids)


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
import pyarrow
from membound.app import store as store_module
def die(path, table): os.kill(os.getpid(), signal.SIGKILL)
store_module._write_table = die
store_module.Store(Path(sys.argv[1])).save_run(
    kind="simulate", label="", digest="", scenario_yaml="", summary={}, tables={"steps": pyarrow.table({"a": [1]})})
"""


def test_a_kill_while_saving_leaves_no_half_run(store):
    earlier = save(store)
    command = [sys.executable, "-P", "-c", KILLED_WRITER, str(store.home)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert [run.id for run in store.runs()] == [earlier]
    (draft,) = store.runs_folder.glob(".draft-*")
    os.utime(draft, (0, 0))
    save(store)
    assert not draft.exists()


def test_a_full_index_fails_in_one_sentence_and_keeps_earlier_runs(store, monkeypatch):
    earlier = save(store)
    connect = Index._connect

    def connect_to_a_full_file(index: Index) -> sqlite3.Connection:
        connection = connect(index)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(Index, "_connect", connect_to_a_full_file)
    with pytest.raises(StoreError) as refusal:
        save(store, summary={"big": "x" * 200_000})
    assert_one_sentence(str(refusal.value), "is full", str(store.index_path), "free some space")
    assert [run.id for run in store.runs()] == [earlier]
    assert [path.name for path in store.runs_folder.iterdir()] == [earlier]


def test_a_full_disk_while_writing_records_fails_in_one_sentence(store, monkeypatch):
    earlier = save(store)

    def no_space(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("membound.app.store._write_text", no_space)
    with pytest.raises(StoreError) as refusal:
        save(store)
    assert_one_sentence(str(refusal.value), "is full", str(store.runs_folder))
    monkeypatch.undo()
    assert [run.id for run in store.runs()] == [earlier]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_really_full_disk_refuses_new_runs_and_still_shows_the_old(small_disk):
    store = Store(small_disk)
    earlier = save(store)
    noise = pd.DataFrame({"x": np.random.default_rng(0).random(300_000)})
    with pytest.raises(StoreError) as refusal:
        save(store, tables={"steps": noise})
    assert_one_sentence(str(refusal.value), "is full", str(small_disk))
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        for size in (65536, 4096, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                continue
    with pytest.raises(StoreError, match="is full"):
        store.submit_job("simulate", {})
    assert [run.id for run in store.runs()] == [earlier]
    assert store.run(earlier).table("steps").num_rows == 5
    assert [path.name for path in store.runs_folder.iterdir()] == [earlier]


def test_an_index_held_by_another_process_is_told_so(store, monkeypatch):
    store.submit_job("simulate", {})
    monkeypatch.setattr(home_module, "BUSY_TIMEOUT_S", 0.1)
    holder = sqlite3.connect(store.index_path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError) as refusal:
        store.submit_job("simulate", {})
    assert_one_sentence(str(refusal.value), "held by another process")
    holder.close()


def test_other_disk_errors_are_sentences_too(tmp_path):
    assert_one_sentence(str(storage_error(OSError(5, "Input/output error"), tmp_path)), "Input/output", str(tmp_path))
    assert_one_sentence(str(storage_error(PermissionError(13, "Permission denied"), tmp_path)), "Cannot write")
