"""What does the store hold: jobs, their events, and finished runs with their records?"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from membound.app.home import StoreError, storage_error

if TYPE_CHECKING:
    import pyarrow

JobState = Literal["queued", "running", "done", "cancelled", "failed", "lost"]
ACTIVE_STATES: tuple[JobState, ...] = ("queued", "running")

# Kinds of runs that somebody measured, and who measures nothing.
MEASURED, SIMULATOR = ("compare", "measure"), "simulator"


@dataclass(frozen=True)
class Job:
    """One piece of long work and how far it got; times are seconds since the epoch."""

    id: str
    kind: str
    state: JobState
    spec: dict[str, Any]
    owner: str
    progress: float
    message: str
    error: str | None
    result: dict[str, Any] | None
    created: float
    started: float | None
    finished: float | None
    pid: int | None
    pid_born: str | None
    cancel_requested: float | None

    @property
    def active(self) -> bool:
        """Whether the job still waits or works."""
        return self.state in ACTIVE_STATES


@dataclass(frozen=True)
class Event:
    """One live point or note of a job; `seq` grows, so a reader asks for what came after the last one it saw."""

    seq: int
    t: float
    kind: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One finished run: its row in the index, and its records in `folder`."""

    id: str
    kind: str
    label: str
    digest: str
    created: float
    job_id: str | None
    summary: dict[str, Any] = field(hash=False)
    folder: Path

    def scenario_yaml(self) -> str:
        """Return the scenario as it was run."""
        return self._text("scenario.yaml")

    def log(self) -> str:
        """Return the log of the job that made this run, empty if there was none."""
        return self._text("log.txt", missing="")

    def comparison(self) -> dict[str, Any] | None:
        """Return the joined comparison, None for a run that compares nothing."""
        return json.loads(self._text("comparison.json", missing="null"))

    def measured_here(self) -> bool:
        """Whether its times are this machine's: it was neither simulated nor measured at a server or by a tool."""
        return self.measurers() == {"runtime"}

    def measurers(self) -> frozenset[str]:
        """Return who measured it: `runtime` on this machine, `endpoint` at a server; nobody of what was simulated."""
        return _measurers(self)

    def conditions(self) -> dict[str, Any]:
        """Return with which code and on what it was made, as far as that was noted when it was kept."""
        conditions: dict[str, Any] = json.loads(self._text("run.json", missing="{}")).get("conditions", {})
        return conditions

    def table_names(self) -> list[str]:
        """Return the names of the run's tables, such as `requests` and `steps`."""
        return sorted(path.stem for path in self.folder.glob("*.parquet"))

    def columns(self, name: str) -> list[str]:
        """Return the columns of one table, without reading its rows."""
        from pyarrow import parquet

        try:
            names: list[str] = parquet.read_schema(self.folder / f"{name}.parquet").names
        except OSError as error:
            raise storage_error(error, self.folder / f"{name}.parquet") from error
        return names

    def table(self, name: str, columns: Sequence[str] | None = None) -> "pyarrow.Table":
        """Read one table, or some columns of it."""
        from pyarrow import parquet

        path = self.folder / f"{name}.parquet"
        try:
            return parquet.read_table(path, columns=list(columns) if columns is not None else None)
        except FileNotFoundError as error:
            raise StoreError(f"Run {self.id} has no table {name!r}; it has {self.table_names()}.") from error
        except OSError as error:
            raise storage_error(error, path) from error

    def _text(self, name: str, missing: str | None = None) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except OSError as error:
            if missing is not None and isinstance(error, FileNotFoundError):
                return missing
            raise storage_error(error, self.folder / name) from error


@lru_cache(maxsize=1000)
def _measurers(run: Run) -> frozenset[str]:
    """Who measured a run, whose files never change."""
    if run.kind not in MEASURED:
        return frozenset()
    provenance = (run.comparison() or {}).get("provenance")
    if provenance is not None:
        return frozenset({provenance.get("producer", "runtime")}) - {SIMULATOR}
    if "requests" not in run.table_names() or "producer" not in run.columns("requests"):
        return frozenset({"runtime"})  # versions before provenance was kept measured here alone
    return frozenset(run.table("requests", ["producer"])["producer"].unique().to_pylist()) - {SIMULATOR}
