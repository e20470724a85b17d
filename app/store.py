"""What was run, what is running, and what came out of it?

`index.sqlite` holds jobs, their events and the index of runs. A run's records are files in `runs/<id>/`, and the
index can be rebuilt from them.
"""

import json
import logging
import math
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from membound.app.home import SCHEMA_VERSION, Index, StoreError, storage_error
from membound.app.records import ACTIVE_STATES, Event, Job, JobState, Run

if TYPE_CHECKING:
    import pandas
    import pyarrow

JOBS_WITH_EVENTS = 200
ABANDONED_AFTER_S = 3600.0

Report = tuple[float, str, Mapping[str, Any]]
"""An event before it is in the store: its time, kind and payload."""

_LOGGER = logging.getLogger(__name__)
_RUN_COLUMNS = "id, kind, label, digest, created, job_id, summary"


class Store:
    """Jobs and runs in one folder, safe to use from several processes at once.

    Every method opens its own connection and closes it, so a Store can be shared between threads and sessions.
    Every method may raise StoreError.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._index = Index(home / "index.sqlite")
        self.index_path = self._index.path
        self.runs_folder = home / "runs"
        self.jobs_folder = home / "jobs"
        self.notes: list[str] = []

    def submit_job(self, kind: str, spec: Mapping[str, Any], owner: str = "") -> str:
        """Queue a job and return its id; `jobs.submit` also starts its worker."""
        job_id = _new_id()
        with self._index.transaction() as index:
            index.execute(
                "INSERT INTO job (id, kind, state, spec, owner, created) VALUES (?, ?, 'queued', ?, ?, ?)",
                (job_id, kind, _to_json(spec), owner, time.time()),
            )
            index.execute(
                "DELETE FROM event WHERE job_id IN (SELECT id FROM job WHERE state NOT IN ('queued', 'running') "
                "ORDER BY created DESC LIMIT -1 OFFSET ?)",
                (JOBS_WITH_EVENTS,),
            )
        return job_id

    def job(self, job_id: str) -> Job:
        """Return one job; StoreError if there is none of this id."""
        with self._index.read() as index:
            row = index.execute("SELECT * FROM job WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise StoreError(f"There is no job {job_id!r} in {self.index_path}: it may have been deleted.")
        return _job(row)

    def jobs(
        self,
        kind: str | Sequence[str] | None = None,
        limit: int = 100,
        *,
        active: bool = False,
        unfinished: bool = False,
    ) -> list[Job]:
        """Return the newest jobs first, of a kind or of several, only those still active or those not done if asked."""
        of_kind, kinds = _of_kind(kind)
        with self._index.read() as index:
            rows = index.execute(
                f"SELECT * FROM job WHERE {of_kind} AND (NOT ? OR state IN ('queued', 'running')) "
                "AND (NOT ? OR state <> 'done') ORDER BY created DESC, id DESC LIMIT ?",
                (*kinds, active, unfinished, limit),
            ).fetchall()
        return [_job(row) for row in rows]

    def seconds_of_jobs(self, job_ids: Sequence[str]) -> dict[str, float]:
        """Return how long each of these jobs worked, without those that did not end."""
        marks = ", ".join("?" * len(job_ids))
        with self._index.read() as index:
            rows = index.execute(
                f"SELECT id, finished - started AS took FROM job WHERE id IN ({marks})", tuple(job_ids)
            ).fetchall()
        return {row["id"]: row["took"] for row in rows if row["took"] is not None}

    def attach_worker(self, job_id: str, pid: int, pid_born: str) -> None:
        """Record which process works on a job, without which nobody can tell that it died."""
        self._update_active(job_id, "pid = ?, pid_born = ?", (pid, pid_born))

    def start_job(self, job_id: str) -> bool:
        """Set a queued job running; False if it is no longer queued."""
        return self._update_active(
            job_id, "state = 'running', message = '', started = ?", (time.time(),), states=("queued",)
        )

    def finish_job(
        self, job_id: str, state: JobState, *, result: Mapping[str, Any] | None = None, error: str | None = None
    ) -> bool:
        """End an active job; False, and nothing changes, if it had ended already."""
        assert state not in ACTIVE_STATES and state in get_args(JobState), state
        return self._update_active(
            job_id,
            "state = ?, result = ?, error = ?, finished = ?, progress = CASE WHEN ? = 'done' THEN 1 ELSE progress END",
            (state, None if result is None else _to_json(result), error, time.time(), state),
        )

    def request_cancel(self, job_id: str) -> None:
        """Ask an active job to stop; asking again does not restart the grace period."""
        self._update_active(job_id, "cancel_requested = COALESCE(cancel_requested, ?)", (time.time(),))

    def job_log_path(self, job_id: str) -> Path:
        """Return where the worker of a job writes its log."""
        return self.jobs_folder / job_id / "log.txt"

    def report(self, job_id: str, events: Sequence[Report] = (), progress: tuple[float, str] | None = None) -> None:
        """Append (time, kind, payload) events of a job and set its (fraction, message), in one transaction."""
        with self._index.transaction() as index:
            index.executemany(
                "INSERT INTO event (job_id, t, kind, payload) VALUES (?, ?, ?, ?)",
                [(job_id, t, kind, _to_json(payload)) for t, kind, payload in events],
            )
            if progress is not None:
                fraction, message = progress
                index.execute(
                    "UPDATE job SET progress = ?, message = ? WHERE id = ? AND state IN ('queued', 'running')",
                    (min(max(fraction, 0.0), 1.0), message, job_id),
                )

    def events(self, job_id: str, after_seq: int = 0, limit: int | None = None) -> list[Event]:
        """Return the events of a job that came after `after_seq`, oldest first."""
        with self._index.read() as index:
            rows = index.execute(
                "SELECT seq, t, kind, payload FROM event WHERE job_id = ? AND seq > ? ORDER BY seq LIMIT ?",
                (job_id, after_seq, -1 if limit is None else limit),
            ).fetchall()
        return [Event(row["seq"], row["t"], row["kind"], json.loads(row["payload"])) for row in rows]

    def save_run(
        self,
        *,
        kind: str,
        label: str,
        digest: str,
        scenario_yaml: str,
        summary: Mapping[str, Any],
        tables: "Mapping[str, pyarrow.Table | pandas.DataFrame] | None" = None,
        comparison: Mapping[str, Any] | None = None,
        job_id: str | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a run and return its id: all of it or nothing, whatever ends the process or fills the disk."""
        run_id = _new_id()
        run = {"kind": kind, "label": label, "digest": digest, "created": time.time(), "job_id": job_id}
        folder = self.runs_folder / run_id
        draft = self.runs_folder / f".draft-{run_id}"
        try:
            draft.mkdir(parents=True)
            self._remove_abandoned_drafts()
            _write_text(draft / "scenario.yaml", scenario_yaml)
            _write_text(draft / "summary.json", _to_json(summary, indent=2))
            if comparison is not None:
                _write_text(draft / "comparison.json", _to_json(comparison, indent=2))
            for name, table in (tables or {}).items():
                _write_table(draft / f"{name}.parquet", table)
            if job_id is not None and self.job_log_path(job_id).exists():
                shutil.copyfile(self.job_log_path(job_id), draft / "log.txt")
            written = {"schema_version": SCHEMA_VERSION, "id": run_id, **run, "conditions": conditions or {}}
            _write_text(draft / "run.json", _to_json(written, indent=2))
            draft.rename(folder)
            with self._index.transaction() as index:
                _insert_run(index, {"id": run_id, **run, "summary": _to_json(summary)})
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise storage_error(error, self.runs_folder) from error
            raise
        return run_id

    def run(self, run_id: str) -> Run:
        """Return one run; StoreError if there is none of this id."""
        found = self._select_runs("id = ?", (run_id,))
        if not found:
            raise StoreError(f"There is no run {run_id!r} in {self.runs_folder}: it may have been deleted.")
        return found[0]

    def runs(
        self, kind: str | Sequence[str] | None = None, digest: str | None = None, limit: int | None = None
    ) -> list[Run]:
        """Return the newest runs first, of a kind or of several, of one scenario (by its digest) if asked."""
        of_kind, kinds = _of_kind(kind)
        return self._select_runs(
            f"{of_kind} AND (? IS NULL OR digest = ?) ORDER BY created DESC, id DESC LIMIT ?",
            (*kinds, digest, digest, -1 if limit is None else limit),
        )

    def delete_run(self, run_id: str) -> None:
        """Delete a run and its records."""
        folder = self.run(run_id).folder
        trash = self.runs_folder / f".draft-{run_id}"
        try:
            folder.rename(trash)
            with self._index.transaction() as index:
                index.execute("DELETE FROM run WHERE id = ?", (run_id,))
            shutil.rmtree(trash)
        except OSError as error:
            raise storage_error(error, folder) from error

    def _select_runs(self, condition: str, values: tuple[Any, ...]) -> list[Run]:
        self._adopt_unlisted_runs()
        with self._index.read() as index:
            rows = index.execute(f"SELECT {_RUN_COLUMNS} FROM run WHERE {condition}", values).fetchall()
        folders = [self.runs_folder / row["id"] for row in rows]
        return [
            Run(**{**dict(row), "summary": json.loads(row["summary"])}, folder=folder)
            for row, folder in zip(rows, folders, strict=True)
            if folder.is_dir()
        ]

    def _update_active(
        self, job_id: str, assignments: str, values: tuple[Any, ...], states: Sequence[JobState] = ACTIVE_STATES
    ) -> bool:
        in_states = ", ".join("?" * len(states))
        with self._index.transaction() as index:
            cursor = index.execute(
                f"UPDATE job SET {assignments} WHERE id = ? AND state IN ({in_states})", (*values, job_id, *states)
            )
            return cursor.rowcount == 1

    def _adopt_unlisted_runs(self) -> None:
        """List run folders that the index does not know: dropped in by hand, or the index was lost."""
        if not self.runs_folder.is_dir():
            return
        with self._index.read() as index:
            listed = {row["id"] for row in index.execute("SELECT id FROM run")}
        folders = [path for path in self.runs_folder.iterdir() if path.name[0] != "." and path.name not in listed]
        if not (found := [run for folder in folders if (run := _read_run_row(folder)) is not None]):
            return
        with self._index.transaction() as index:
            for run in found:
                _insert_run(index, run)
        note = f"{self.index_path} did not know {len(found)} of the runs in {self.runs_folder}: they are listed again."
        self.notes.append(note)
        _LOGGER.warning(note)

    def _remove_abandoned_drafts(self) -> None:
        for draft in self.runs_folder.glob(".draft-*"):
            with suppress(OSError):
                if time.time() - draft.stat().st_mtime > ABANDONED_AFTER_S:
                    shutil.rmtree(draft)


def _of_kind(kind: str | Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
    """A condition on the kinds that are asked for, and its values."""
    if kind is None:
        return "TRUE", ()
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    return f"kind IN ({', '.join('?' * len(kinds))})", kinds


def _insert_run(index: sqlite3.Connection, run: Mapping[str, Any]) -> None:
    index.execute(
        f"INSERT OR REPLACE INTO run ({_RUN_COLUMNS}) "
        "VALUES (:id, :kind, :label, :digest, :created, :job_id, :summary)",
        run,
    )


def _read_run_row(folder: Path) -> dict[str, Any] | None:
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        row = {name: run[name] for name in ("kind", "label", "digest", "created", "job_id")}
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return {**row, "id": folder.name, "summary": _to_json(summary)}
    except (OSError, ValueError, KeyError, TypeError):
        _LOGGER.warning("%s is not the folder of a run: it is left out.", folder)
        return None


def _job(row: sqlite3.Row) -> Job:
    values = dict(row)
    values["spec"] = json.loads(values["spec"])
    values["result"] = None if values["result"] is None else json.loads(values["result"])
    return Job(**values)


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """Turn numpy scalars and arrays, paths and tuples into JSON's types; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write_table(path: Path, table: "pyarrow.Table | pandas.DataFrame") -> None:
    import pyarrow
    from pyarrow import parquet

    if not isinstance(table, pyarrow.Table):
        table = pyarrow.Table.from_pandas(table, preserve_index=False)
    parquet.write_table(table, path, compression="zstd")
