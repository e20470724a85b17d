"""What does a worker process do with its job?

`python -m membound.app.worker JOB_ID` waits for its turn, calls the job's task, and records how it ended.
"""

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from membound.app.home import StoreError, membound_home
from membound.app.jobs import measurement_slot, poll, process_born
from membound.app.records import Job
from membound.app.store import Store
from membound.roofline.errors import MemboundError

Task = Callable[[dict[str, Any], "JobContext"], Mapping[str, Any] | None]

TASKS = {
    "calibrate": "membound.app.tasks:run_calibrate",
    "compare": "membound.app.tasks:run_compare",
    "experiment": "membound.app.tasks:run_experiment",
    "max_rate": "membound.app.tasks:run_max_rate",
    "measure": "membound.app.tasks:run_measure",
    "plan": "membound.app.tasks:run_plan",
    "policies": "membound.app.tasks:run_policies",
    "simulate": "membound.app.tasks:run_simulate",
    "stack": "membound.app.tasks:run_stack",
    "validate": "membound.app.tasks:run_validate",
}
MEASUREMENTS = frozenset({"measure", "compare", "calibrate", "experiment"})
FLUSH_INTERVAL_S = 0.25
_LOGGER = logging.getLogger("membound.worker")


class JobCancelled(BaseException):
    """The job was asked to stop; not an Exception, so that a task that catches those still stops."""


class JobContext:
    """What a task sees of its job: where to report progress and points, and whether to stop.

    Reports are buffered and written at most four times a second, so a task may report every step.
    """

    def __init__(self, store: Store, job_id: str) -> None:
        self.store = store
        self.job_id = job_id
        self.log = _LOGGER
        self._lock = threading.Lock()
        self._events: list[tuple[float, str, Mapping[str, Any]]] = []
        self._progress: tuple[float, str] | None = None
        self._cancelled = False
        self._cancel_read_at = float("-inf")

    def progress(self, fraction: float, message: str = "") -> None:
        """Report how much is done, from 0 to 1, and what is being done."""
        with self._lock:
            self._progress = (fraction, message)

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Report one live point or note; `payload` holds numbers and text."""
        with self._lock:
            self._events.append((time.time(), kind, payload))

    def cancelled(self) -> bool:
        """Return whether the job was asked to stop; cheap enough for every step."""
        if not self._cancelled and time.monotonic() - self._cancel_read_at >= FLUSH_INTERVAL_S:
            self._cancel_read_at = time.monotonic()
            self._cancelled = self.store.job(self.job_id).cancel_requested is not None
        return self._cancelled

    def check_cancelled(self) -> None:
        """Raise JobCancelled if the job was asked to stop."""
        if self.cancelled():
            raise JobCancelled

    def flush(self) -> None:
        """Write what was reported since the last flush."""
        with self._lock:
            events, self._events = self._events, []
            progress, self._progress = self._progress, None
        if events or progress is not None:
            try:
                self.store.report(self.job_id, events, progress)
            except MemboundError:
                with self._lock:
                    self._events[:0] = events
                    self._progress = self._progress or progress
                raise

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Flush in the background while the block runs, and once at its end."""
        ended = threading.Event()
        flusher = threading.Thread(target=self._flush_until, args=(ended,), name="flusher", daemon=True)
        flusher.start()
        try:
            yield
        finally:
            ended.set()
            flusher.join()
            self.flush()

    def _flush_until(self, ended: threading.Event) -> None:
        while not ended.wait(FLUSH_INTERVAL_S):
            try:
                self.flush()
            except MemboundError:
                self.log.exception("what the task reported is not written yet")


def run_job(store: Store, job_id: str) -> None:
    """Run a queued job to its end and record the end, whatever it is."""
    signal.signal(signal.SIGTERM, _cancel_by_signal)
    job = store.job(job_id)
    context = JobContext(store, job_id)
    store.attach_worker(job_id, os.getpid(), process_born(os.getpid()))
    try:
        with _turn(context, job), context.flushing():
            context.check_cancelled()
            if not store.start_job(job_id):
                return
            result = load_task(job.kind)(job.spec, context)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        store.finish_job(job_id, "done", result=result or {})
    except JobCancelled:
        store.finish_job(job_id, "cancelled")
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _LOGGER.exception("the task failed")
        store.finish_job(job_id, "failed", error=error_sentence(error))


def load_task(kind: str) -> Task:
    """Import the task of a kind; `$MEMBOUND_TASKS` may add some as `kind=module:function,...`."""
    tasks = dict(TASKS)
    for entry in filter(None, os.environ.get("MEMBOUND_TASKS", "").split(",")):
        name, _, path = entry.partition("=")
        tasks[name] = path
    if kind not in tasks:
        raise MemboundError(f"There is no job of kind {kind!r}: it is one of {', '.join(sorted(tasks))}.")
    module, _, function = tasks[kind].partition(":")
    return getattr(importlib.import_module(module), function)


def error_sentence(error: Exception) -> str:
    """Return what a person reads of an error: its sentence if it was written for them, else its name and the log."""
    if isinstance(error, MemboundError) or _is_refusal_of_ours(error):
        return str(error)
    if hasattr(error, "errors") and type(error).__module__.startswith("pydantic"):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'input'}: {first['msg']}."
    return f"{type(error).__name__}: {str(error).strip() or 'no message'} (details in log.txt)"


def _is_refusal_of_ours(error: Exception) -> bool:
    """Whether a plain ValueError was raised by membound itself with one sentence, not by a library underneath."""
    if type(error) is not ValueError or "\n" in str(error):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("membound.")


@contextmanager
def _turn(context: JobContext, job: Job) -> Iterator[None]:
    if job.kind not in MEASUREMENTS:
        yield
        return
    shown = None

    def show(ahead: str) -> None:
        nonlocal shown
        context.check_cancelled()
        if ahead != shown:
            if _calibrates(context.store, ahead):
                context.store.report(job.id, progress=(0.0, "the roofs of this machine are measured first"))
            else:
                context.store.report(job.id, progress=(0.0, f"waiting for run {ahead} to finish"))
            shown = ahead

    with measurement_slot(job.id, show, lambda: _queued_before(context.store, job)):
        yield


def _calibrates(store: Store, job_id: str) -> bool:
    """Whether a job measures the roofs of this machine."""
    try:
        return store.job(job_id).kind == "calibrate"
    except StoreError:  # of another store
        return False


def _queued_before(store: Store, job: Job) -> str | None:
    for other in reversed(store.jobs(active=True)):
        earlier = (other.created, other.id) < (job.created, job.id)
        if earlier and other.kind in MEASUREMENTS and other.state == "queued" and poll(store, other.id).active:
            return other.id
    return None


def _cancel_by_signal(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise JobCancelled


def main() -> None:
    """Run the job named on the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run_job(Store(membound_home()), sys.argv[1])


if __name__ == "__main__":
    main()
