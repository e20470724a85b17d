"""Do jobs end as they should, whatever happens to the page, the server and the worker?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from membound.app import jobs, worker
from membound.app.home import StoreError
from membound.app.i18n import LANGUAGES, Translate
from membound.app.news import progress_said
from membound.app.records import Job
from membound.app.store import Store
from membound.roofline.errors import MemboundError

TASKS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from membound.app.home import StoreError

def count(spec, context):
    for i in range(spec["steps"]):
        context.check_cancelled()
        context.progress((i + 1) / spec["steps"], f"step {i + 1}")
        context.event("point", {"i": i})
        time.sleep(spec.get("pause_s", 0.01))
    return {"steps": spec["steps"]}

def stubborn(spec, context):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.event("deaf", {})
    while True:
        time.sleep(1)

def deaf_until_signalled(spec, context):
    context.event("deaf", {})
    while True:
        time.sleep(1)

def talk(spec, context):
    for i in range(1000):
        context.event("point", {"i": i})
        context.progress(i / 1000)
    time.sleep(1.2)

def parent(spec, context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    context.event("child", {"pid": child.pid})
    context.log.info("rank 1 is up")
    time.sleep(60)

def refuse(spec, context):
    raise StoreError("The disk is full: free some space.")

def crash(spec, context):
    raise RuntimeError("shapes differ")

def measured(spec, context):
    context.event("window", {"from": time.time()})
    while Path(spec["while"]).exists():
        time.sleep(0.05)
    context.event("window", {"to": time.time()})
"""

NO_TIME = {"while": "/nowhere"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tasks_of_these_tests.py").write_text(TASKS)
    names = ["count", "stubborn", "deaf_until_signalled", "talk", "parent", "refuse", "crash"]
    tasks = {name: name for name in names} | {"measure": "measured", "calibrate": "measured"}
    monkeypatch.setenv("MEMBOUND_TASKS", ",".join(f"{k}=tasks_of_these_tests:{f}" for k, f in tasks.items()))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MEMBOUND_SLOT", str(tmp_path / "slot.lock"))
    store = Store(tmp_path / "home")
    store.home.mkdir()
    yield store
    for job in store.jobs(active=True):
        if job.pid is not None and jobs.process_born(job.pid) == job.pid_born:
            os.killpg(job.pid, signal.SIGKILL)


def until(condition, timeout_s: float = 60.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return value


def test_a_job_runs_in_its_own_process_and_reports(store):
    job_id = jobs.submit(store, "count", {"steps": 20}, owner="tab-1")
    job = jobs.wait(store, job_id, timeout_s=60)
    assert (job.state, job.error, job.result, job.progress) == ("done", None, {"steps": 20}, 1.0)
    assert job.pid != os.getpid() and job.owner == "tab-1"
    assert [event.payload["i"] for event in store.events(job_id)] == list(range(20))
    until(lambda: not Path(f"/proc/{job.pid}").exists())


def test_another_process_sees_the_same_job(store):
    job_id = jobs.submit(store, "count", {"steps": 100_000})
    until(lambda: store.events(job_id))
    again = jobs.poll(Store(store.home), job_id)
    assert again.state == "running" and 0 < again.progress < 1 and again.message.startswith("step ")
    jobs.cancel(store, job_id)
    jobs.wait(store, job_id, timeout_s=60)


SERVER = """
import sys
from pathlib import Path
from membound.app import jobs
from membound.app.store import Store
print(jobs.submit(Store(Path(sys.argv[1])), "count", {"steps": 50}), flush=True)
sys.stdin.read()
"""


def test_a_job_outlives_the_server_that_started_it(store):
    command = [sys.executable, "-P", "-c", SERVER, str(store.home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        job_id = server.stdout.readline().strip()
        server.kill()
    assert jobs.wait(store, job_id, timeout_s=60).state == "done"


def test_a_cooperative_job_is_cancelled_within_two_seconds(store, monkeypatch):
    """As its own steps of 10 ms tell, of which a machine with other work makes fewer."""
    monkeypatch.setattr(jobs, "TERMINATE_AFTER_S", 1000.0)
    job_id = jobs.submit(store, "count", {"steps": 100_000})
    until(lambda: store.events(job_id))
    jobs.cancel(store, job_id)
    job = jobs.wait(store, job_id, timeout_s=60)
    assert job.state == "cancelled" and job.error is None
    assert len([event for event in store.events(job_id) if event.t > job.cancel_requested]) <= 200


def test_a_job_that_does_not_look_is_terminated(store, monkeypatch):
    monkeypatch.setattr(jobs, "TERMINATE_AFTER_S", 0.3)
    job_id = jobs.submit(store, "deaf_until_signalled", {})
    until(lambda: store.events(job_id))
    jobs.cancel(store, job_id)
    job = jobs.wait(store, job_id, timeout_s=60)
    assert job.state == "cancelled"
    assert "Traceback" not in jobs.log_tail(store, job_id)


def test_a_stubborn_job_is_killed_by_whoever_polls(store, monkeypatch):
    monkeypatch.setattr(jobs, "TERMINATE_AFTER_S", 0.2)
    monkeypatch.setattr(jobs, "KILL_AFTER_S", 0.6)
    job_id = jobs.submit(store, "stubborn", {})
    until(lambda: store.events(job_id))
    store.request_cancel(job_id)
    until(lambda: not jobs.poll_active(Store(store.home)), timeout_s=60)
    assert store.job(job_id).state == "cancelled"


def test_nothing_is_killed_that_was_born_at_another_time(store, monkeypatch):
    monkeypatch.setattr(jobs, "TERMINATE_AFTER_S", 0.0)
    monkeypatch.setattr(jobs, "KILL_AFTER_S", 0.0)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], start_new_session=True)
    try:
        job_id = store.submit_job("count", {})
        store.attach_worker(job_id, bystander.pid, "1")
        assert jobs.cancel(store, job_id).state == "cancelled"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_killed_worker_is_lost_with_a_sentence_and_its_children_end(store):
    job_id = jobs.submit(store, "parent", {})
    (event,) = until(lambda: store.events(job_id))
    job = store.job(job_id)
    os.kill(job.pid, signal.SIGKILL)
    job = jobs.wait(store, job_id, timeout_s=60)
    assert job.state == "lost"
    assert job.error.startswith("The worker process ended without a word") and "rank 1 is up" in job.error
    until(lambda: not jobs.process_born(event.payload["pid"]))


def test_a_worker_that_was_never_started_is_lost(store, monkeypatch):
    job_id = store.submit_job("count", {})
    assert jobs.poll(store, job_id).state == "queued"
    monkeypatch.setattr(jobs, "NEVER_STARTED_AFTER_S", 0.0)
    job = jobs.poll(store, job_id)
    assert (job.state, job.error) == ("lost", "The worker process was never started: run it again.")


def test_a_finished_job_is_not_touched_by_polls(store):
    job_id = store.submit_job("count", {})
    store.attach_worker(job_id, 2**22, "1")
    store.start_job(job_id)
    store.finish_job(job_id, "done", result={})
    assert jobs.poll(store, job_id).state == "done"
    assert jobs.cancel(store, job_id).state == "done"


def test_a_refusal_is_shown_as_its_one_sentence(store):
    job = jobs.wait(store, jobs.submit(store, "refuse", {}), timeout_s=60)
    assert (job.state, job.error) == ("failed", "The disk is full: free some space.")


def test_a_crash_shows_its_name_and_keeps_the_traceback_in_the_log(store):
    job = jobs.wait(store, jobs.submit(store, "crash", {}), timeout_s=60)
    assert (job.state, job.error) == ("failed", "RuntimeError: shapes differ (details in log.txt)")
    assert "Traceback" in jobs.log_tail(store, job.id)


def test_a_kind_nobody_knows_fails_and_names_those_there_are(store):
    job = jobs.wait(store, jobs.submit(store, "fly", {}), timeout_s=60)
    assert job.state == "failed" and "'fly'" in job.error and "simulate" in job.error


def test_measurements_take_turns_in_order_and_say_whom_they_wait_for(store):
    held = store.home / "held"
    held.touch()
    first = jobs.submit(store, "measure", {"while": str(held)})
    until(lambda: store.events(first))
    second = jobs.submit(store, "calibrate", NO_TIME)
    third = jobs.submit(store, "measure", NO_TIME)
    waiting = until(lambda: [j for j in (store.job(second),) if j.message])[0]
    assert (waiting.state, waiting.message) == ("queued", f"waiting for run {first} to finish")
    held.unlink()
    ended = [jobs.wait(store, job_id, timeout_s=60) for job_id in (first, second, third)]
    assert [job.state for job in ended] == ["done"] * 3
    windows = [[event.payload for event in store.events(job.id)] for job in ended]
    assert windows[0][1]["to"] <= windows[1][0]["from"] and windows[1][1]["to"] <= windows[2][0]["from"]


@pytest.mark.parametrize("language", list(LANGUAGES))
@pytest.mark.parametrize("kind", ["plan", "measure"])
def test_a_job_that_has_told_nothing_yet_is_said_to_begin(store, kind, language):
    job_id = store.submit_job(kind, {})
    assert store.start_job(job_id)
    said, of, waited = progress_said(store.job(job_id), Translate(language)).partition(" · ")
    assert said.strip() and of and waited.endswith("s")


def test_a_simulation_does_not_wait_for_a_measurement(store):
    measurement = jobs.submit(store, "measure", {"while": str(store.home)})
    until(lambda: store.events(measurement))
    assert jobs.wait(store, jobs.submit(store, "count", {"steps": 1}), timeout_s=60).state == "done"
    waiting = jobs.submit(store, "measure", NO_TIME)
    until(lambda: store.job(waiting).message)
    jobs.cancel(store, waiting)
    assert jobs.wait(store, waiting, timeout_s=60).state == "cancelled"
    os.kill(store.job(measurement).pid, signal.SIGKILL)
    assert jobs.wait(store, jobs.submit(store, "measure", NO_TIME), timeout_s=60).state == "done"


def test_a_thousand_reports_cost_few_transactions(store, monkeypatch):
    reports = []
    report = Store.report
    monkeypatch.setattr(Store, "report", lambda self, *a, **k: (reports.append(1), report(self, *a, **k)))
    context = worker.JobContext(store, store.submit_job("talk", {}))
    with context.flushing():
        start = time.monotonic()
        i = 0
        while time.monotonic() - start < 0.9:
            context.event("point", {"i": i})
            context.progress(0.5, "talking")
            time.sleep(0.001)
            i += 1
        lasted_s = time.monotonic() - start
    assert 1 <= len(reports) <= lasted_s / worker.FLUSH_INTERVAL_S + 2
    assert store.events(context.job_id)[-1].payload == {"i": i - 1}


def test_reports_that_could_not_be_written_are_written_later(store, monkeypatch):
    context = worker.JobContext(store, store.submit_job("talk", {}))
    context.event("point", {"i": 0})

    def full(self, *arguments):
        raise StoreError("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "report", full)
        with pytest.raises(StoreError):
            context.flush()
    context.event("point", {"i": 1})
    context.flush()
    assert [event.payload["i"] for event in store.events(context.job_id)] == [0, 1]


class Batch(BaseModel):
    batch: int


def caught(function) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_errors_become_the_sentence_a_person_reads():
    assert worker.error_sentence(MemboundError("batch is 0: at least 1.")) == "batch is 0: at least 1."
    refusal = caught(lambda: Batch.model_validate({"batch": "many"}))
    assert isinstance(refusal, ValidationError)
    assert worker.error_sentence(refusal).startswith("batch: Input should be a valid integer")
    from_library = caught(lambda: int("x"))
    assert worker.error_sentence(from_library).startswith("ValueError: invalid literal")
    assert worker.error_sentence(KeyError()) == "KeyError: no message (details in log.txt)"


def test_wait_shows_each_state_and_gives_up_in_time(store):
    job_id = store.submit_job("count", {})
    seen: list[Job] = []
    assert jobs.wait(store, job_id, timeout_s=0.2, interval_s=0.05, watch=seen.append).state == "queued"
    assert len(seen) >= 2


def test_a_process_has_one_birth_and_a_dead_one_none():
    assert jobs.process_born(os.getpid()) == jobs.process_born(os.getpid()) != ""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert jobs.process_born(child.pid) == ""
    child.wait()
    assert jobs.process_born(child.pid) == ""


def test_a_worker_imports_no_torch_and_no_streamlit():
    code = "import sys, membound.app.worker; print({'torch', 'streamlit', 'pandas', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
