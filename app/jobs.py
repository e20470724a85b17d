"""How is long work started, watched and stopped, whoever asked and whether or not they are still there?

A job is a row in the store and a worker process of its own. Nothing about it is kept in memory, so it outlives the
page, the tab and the server that started it.
"""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from membound.app.home import storage_error
from membound.app.records import Job
from membound.app.store import Store

TERMINATE_AFTER_S = 5.0
KILL_AFTER_S = 10.0
NEVER_STARTED_AFTER_S = 30.0
SLOT_INTERVAL_S = 0.25
LOG_LINES_IN_ERROR = 5
JOB_ID_VARIABLE = "MEMBOUND_JOB_ID"


def submit(store: Store, kind: str, spec: Mapping[str, Any], owner: str = "") -> str:
    """Queue a job, start its worker process and return the job's id.

    `kind` is one of `worker.TASKS`; the worker calls that task with `spec`.
    """
    job_id = store.submit_job(kind, spec, owner)
    log_path = store.job_log_path(job_id)
    environment = {
        **os.environ,
        "MEMBOUND_HOME": str(store.home),
        JOB_ID_VARIABLE: job_id,
        "PYTHONUNBUFFERED": "1",
    }
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "membound.app.worker", job_id],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
    except OSError as error:
        sentence = storage_error(error, log_path)
        store.finish_job(job_id, "failed", error=str(sentence))
        raise sentence from error
    threading.Thread(target=worker.wait, name=f"reaper-{job_id}", daemon=True).start()
    store.attach_worker(job_id, worker.pid, process_born(worker.pid))
    return job_id


def poll(store: Store, job_id: str) -> Job:
    """Return a job as it stands, after doing for it what its worker no longer can.

    A cancelled job whose worker does not stop is terminated, then killed; a job whose worker died is `lost`.
    """
    job = store.job(job_id)
    if not job.active:
        return job
    if _worker_is_alive(job):
        if job.cancel_requested is not None:
            _press(job)
        return job
    _end_orphans(job)
    if job.cancel_requested is not None:
        store.finish_job(job_id, "cancelled")
    else:
        store.finish_job(job_id, "lost", error=_obituary(store, job))
    return store.job(job_id)


def poll_active(store: Store) -> list[Job]:
    """Poll every job that waits or works; a server does so now and then, so that every cancel comes to its end."""
    return [poll(store, job.id) for job in store.jobs(active=True)]


def cancel(store: Store, job_id: str) -> Job:
    """Ask a job to stop and return it as it stands; later polls see to it that it does."""
    store.request_cancel(job_id)
    return poll(store, job_id)


def wait(
    store: Store,
    job_id: str,
    timeout_s: float | None = None,
    interval_s: float = 0.1,
    watch: Callable[[Job], None] = lambda job: None,
) -> Job:
    """Poll until the job has ended or the time is over, and show each state to `watch`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        job = poll(store, job_id)
        watch(job)
        if not job.active or (deadline is not None and time.monotonic() > deadline):
            return job
        time.sleep(interval_s)


def log_tail(store: Store, job_id: str, lines: int = 20) -> str:
    """Return the last lines that the worker of a job wrote."""
    try:
        with store.job_log_path(job_id).open(encoding="utf-8", errors="replace") as log:
            return "".join(deque(log, maxlen=lines)).rstrip()
    except OSError:
        return ""


@contextmanager
def measurement_slot(
    holder: str, on_wait: Callable[[str], None], ahead: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Hold this machine's one slot for measurements while the block runs, because two at once would disturb each other.

    Until it is free and `ahead` names nobody, `on_wait` is called with the name of who is in front; it may raise to
    give up.
    """
    slot = _open_slot()
    try:
        while (in_front := ahead() or _take_slot(slot)) is not None:
            on_wait(in_front)
            time.sleep(SLOT_INTERVAL_S)
        os.ftruncate(slot, 0)
        os.pwrite(slot, holder.encode(), 0)
        yield
    finally:
        os.close(slot)


def process_born(pid: int) -> str:
    """Return when a process was started, as the system says it; empty if there is none, or if it is a zombie.

    Process numbers are used again, so a number and a birth together name a process.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The name in brackets may hold anything, so fields are counted from the last bracket (proc(5)).
            state, *fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if state in "ZX" else fields[18]
    command = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    state, _, born = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().partition(" ")
    return "" if state.startswith("Z") else born.strip()


def _open_slot() -> int:
    path = Path(os.environ.get("MEMBOUND_SLOT") or Path(tempfile.gettempdir()) / "membound-measurement.lock")
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        slot = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.fchmod(slot, 0o666)
        return slot


def _take_slot(slot: int) -> str | None:
    """Take the slot and return None, or return the name of who holds it."""
    # lockf, not flock: children that a killed worker leaves behind would inherit a flock and keep it.
    try:
        fcntl.lockf(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return os.pread(slot, 100, 0).decode(errors="replace") or "another"
    return None


def _worker_is_alive(job: Job) -> bool:
    if job.pid is None:
        return time.time() - job.created < NEVER_STARTED_AFTER_S
    return bool(job.pid_born) and process_born(job.pid) == job.pid_born


def _press(job: Job) -> None:
    assert job.cancel_requested is not None
    waited_s = time.time() - job.cancel_requested
    if job.pid is not None and waited_s >= TERMINATE_AFTER_S:
        _signal_group(job.pid, signal.SIGKILL if waited_s >= KILL_AFTER_S else signal.SIGTERM)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _end_orphans(job: Job) -> None:
    """Kill what a dead worker left running (ranks of a parallel run), known by the job's id in its environment."""
    mark = f"{JOB_ID_VARIABLE}={job.id}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
        except OSError:
            continue


def _obituary(store: Store, job: Job) -> str:
    if job.pid is None:
        return "The worker process was never started: run it again."
    sentence = "The worker process ended without a word (killed, or out of memory): run it again."
    tail = log_tail(store, job.id, LOG_LINES_IN_ERROR)
    return f"{sentence} Last lines of its log:\n{tail}" if tail else sentence
