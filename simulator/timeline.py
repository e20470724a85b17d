"""What did the engine do when, and what held each request up? A run as a timeline, for a trace viewer or a table.

Steps are named by what bound them; requests are queued, prefilled, decoding or preempted; counters say how many run
and wait, and how many KV blocks are in use. Equal steps that ran as one are one slice that says how many they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import BOUNDS, Column, RunResult
from membound.simulator.scheduling.request import Outcome, Step

Phase = Literal["queued", "prefill", "decode", "preempted"]
PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode", "preempted")
# Slices of a trace at most: viewers that run in a browser become slow beyond.
MOST_SLICES = 200_000
SUFFIXES = (".json", ".csv", ".parquet")

_STEPS, _REQUESTS = 1, 2  # process ids of the trace
_TOLD = ("steps", "tokens", "sequences", "prefill_tokens", "prefill_sequences", "drafted", "accepted", "emitted")
# Times closer than this are the same moment: sums of step times differ in their last bits.
_MOMENT_DIGITS = 9


class PhaseLog:
    """An observer of a run that keeps when requests were preempted and went on, which no table of a result says."""

    def __init__(self) -> None:
        self.changes: dict[int, list[tuple[float, Phase]]] = {}

    def __call__(self, step: Step, outcome: Outcome, end_s: float) -> None:
        start_s = end_s - outcome.time_s
        for id in step.preempted:
            self.changes.setdefault(id, []).append((start_s, "preempted"))
        if not self.changes:
            return
        for id in step.admitted:
            self._changed(id, start_s, "prefill")
        for id in step.resumed:
            self._changed(id, start_s, "decode")
        for work in step.prompts:
            if work.emits:
                self._changed(work.sequence, end_s, "decode")

    def _changed(self, id: int, at_s: float, phase: Phase) -> None:
        if id in self.changes:
            self.changes[id].append((at_s, phase))


class Slice(NamedTuple):
    """A request was in a phase from `start_s` on."""

    request: int
    phase: Phase
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class Timeline:
    """Steps and requests' phases of a run that began in the window [from_s, to_s), and what counters said.

    `steps` has columns as a result's, and `lane`: engines that run at the same time have different ones. `counters`
    are at the moments `moments_s`. `note` says what is not shown.
    """

    name: str
    steps: dict[str, Column]
    phases: list[Slice]
    moments_s: Column
    counters: dict[str, Column]
    from_s: float
    to_s: float
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        result: RunResult,
        log: PhaseLog | None = None,
        from_s: float | None = None,
        to_s: float | None = None,
        most: int = MOST_SLICES,
    ) -> Timeline:
        """The timeline of a run, or of a window of it; a window of more than `most` slices is made shorter.

        Raises MemboundError where the window is empty.
        """
        end_s = float(result.summary.duration_s)
        begin_s, stop_s = checked_window(from_s, to_s)
        if begin_s > end_s:
            raise MemboundError(f"--from is {begin_s:g}, but the run ends after {end_s:.6g} s; give less")
        notes = _notes(result, log)
        phases = _phases(result.requests, log)
        starts = np.sort(np.concatenate([result.steps["start_s"], phases.start_s]))
        inside = starts[(starts >= begin_s) & (starts < stop_s)]
        if len(inside) > most:
            stop_s = float(inside[most])
            notes.append(
                f"shown are the {most} slices from {begin_s:g} s to {stop_s:.6g} s of {len(starts)} slices in "
                f"{end_s:.6g} s; choose others with --from and --to"
            )
        elif len(inside) < len(starts):
            notes.append(
                f"shown are {len(inside)} of {len(starts)} slices: those that begin from {begin_s:g} s to "
                f"{min(stop_s, end_s):.6g} s of {end_s:.6g} s"
            )
        lanes = result.steps.get("replica")
        if lanes is None:
            lanes = _lanes(result.steps["start_s"], result.steps["time_s"])
        steps = result.steps | {"lane": lanes}
        keep = _within(steps["start_s"], begin_s, stop_s)
        moments_s, counters = _counters(result.steps, phases)
        seen = _within(moments_s, begin_s, stop_s)
        return cls(
            result.scenario.name,
            {name: column[keep] for name, column in steps.items()},
            phases.slices(_within(phases.start_s, begin_s, stop_s)),
            moments_s[seen],
            {name: column[seen] for name, column in counters.items()},
            begin_s,
            float(min(stop_s, end_s)),
            notes,
        )

    def bounds(self) -> list[str]:
        """What bound each step most."""
        if not len(self.steps["start_s"]):
            return []
        shares = np.stack([self.steps[bound] for bound in BOUNDS])
        return [BOUNDS[index] for index in shares.argmax(axis=0)]

    def write(self, path: Path) -> None:
        """As a Chrome trace (.json, which Perfetto opens too), or as a table (.csv, .parquet)."""
        try:
            match checked_suffix(path):
                case ".json":
                    path.write_text(self.to_chrome(), "utf-8")
                case ".csv":
                    from pyarrow import csv

                    csv.write_csv(self.table(), path)
                case _:
                    from pyarrow import parquet

                    parquet.write_table(self.table(), path)
        except OSError as error:
            raise MemboundError(f"timeline '{path}' cannot be written: {error.strerror or error}") from None

    def to_chrome(self) -> str:
        """The trace in the JSON of Chrome's trace event format, one event a line, in order of time."""
        events = [*self._slices_of_steps(), *self._slices_of_requests(), *self._counts()]
        events.sort(key=lambda event: event["ts"])
        lines = ",\n".join(json.dumps(event, allow_nan=False) for event in [*self._names(), *events])
        about = json.dumps({"scenario": self.name, "notes": self.notes})
        return f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [\n{lines}\n]}}\n'

    def table(self) -> Any:
        """One pyarrow table: `kind` says whether a row is a step, a phase of a request, or counters at a moment.

        Steps have `name`, the bound, and columns of their own; columns of other kinds are null.
        """
        import pyarrow

        starts = self.steps["start_s"]
        parts = [
            pyarrow.table(
                {
                    "kind": ["step"] * len(starts),
                    "name": pyarrow.array(self.bounds(), pyarrow.string()),
                    "start_s": starts,
                    "duration_s": self.steps["time_s"],
                    "lane": self.steps["lane"],
                }
                | {name: self.steps[name] for name in (*_TOLD, "blocks_used", *BOUNDS)}
            ),
            pyarrow.table(
                {
                    "kind": ["phase"] * len(self.phases),
                    "name": pyarrow.array([one.phase for one in self.phases], pyarrow.string()),
                    "start_s": pyarrow.array([one.start_s for one in self.phases], pyarrow.float64()),
                    "duration_s": pyarrow.array([one.duration_s for one in self.phases], pyarrow.float64()),
                    "request": pyarrow.array([one.request for one in self.phases], pyarrow.int64()),
                }
            ),
            pyarrow.table({"kind": ["counters"] * len(self.moments_s), "start_s": self.moments_s} | self.counters),
        ]
        return pyarrow.concat_tables(parts, promote_options="default")

    # -- the events of a trace

    def _names(self) -> Iterator[dict[str, Any]]:
        lanes = {int(lane) for lane in self.steps["lane"]}
        seats = range(1 + max(self._seats, default=-1))
        for pid, title, prefix, threads in (
            (_STEPS, f"{self.name}: engine", "steps", sorted(lanes)),
            (_REQUESTS, f"{self.name}: requests", "seat", seats),
        ):
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": title}}
            for lane in threads:
                args = {"name": f"{prefix} {lane + 1}"}
                yield {"ph": "M", "pid": pid, "tid": lane + 1, "name": "thread_name", "args": args}

    def _slices_of_steps(self) -> Iterator[dict[str, Any]]:
        columns = {name: self.steps[name].tolist() for name in ("start_s", "time_s", "lane", *_TOLD, *BOUNDS)}
        for index, bound in enumerate(self.bounds()):
            steps = columns["steps"][index]
            told = {name: columns[name][index] for name in _TOLD}
            shares = {name: round(columns[name][index], 4) for name in BOUNDS if columns[name][index] > 0}
            time_s = columns["time_s"][index]
            yield {
                "ph": "X",
                "pid": _STEPS,
                "tid": int(columns["lane"][index]) + 1,
                "name": bound if steps == 1 else f"{bound} x {steps:.0f}",
                "cat": "step",
                "ts": columns["start_s"][index] * 1e6,
                "dur": time_s * 1e6,
                "args": told | {"ms_per_step": time_s / steps * 1e3, "shares": shares},
            }

    def _slices_of_requests(self) -> Iterator[dict[str, Any]]:
        for one, seat in zip(self.phases, self._seats, strict=True):
            yield {
                "ph": "X",
                "pid": _REQUESTS,
                "tid": seat + 1,
                "name": one.phase,
                "cat": "request",
                "ts": one.start_s * 1e6,
                "dur": one.duration_s * 1e6,
                "args": {"request": one.request},
            }

    @property
    def _seats(self) -> list[int]:
        """A row for each slice: the phases of a request lie in one, and no two requests in the same at a time."""
        whole: dict[int, tuple[float, float]] = {}
        for one in self.phases:
            begin_s, end_s = whole.get(one.request, (one.start_s, one.start_s))
            whole[one.request] = min(begin_s, one.start_s), max(end_s, one.start_s + one.duration_s)
        requests = sorted(whole, key=lambda id: whole[id])
        spans = np.array([whole[id] for id in requests], dtype=float).reshape(-1, 2)
        seats = dict(zip(requests, _lanes(spans[:, 0], spans[:, 1] - spans[:, 0]).tolist(), strict=True))
        return [seats[one.request] for one in self.phases]

    def _counts(self) -> Iterator[dict[str, Any]]:
        moments = (self.moments_s * 1e6).tolist()
        for name, column in self.counters.items():
            before = None
            for ts, value in zip(moments, column.tolist(), strict=True):
                if value != before:
                    yield {"ph": "C", "pid": _STEPS, "name": name, "ts": ts, "args": {name: value}}
                before = value


def checked_suffix(path: Path) -> str:
    """What a timeline is written as; raises MemboundError for a suffix that says nothing."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise MemboundError(f"option --timeline is '{path}'; give a file that ends in {', '.join(SUFFIXES)}")
    return suffix


def checked_window(from_s: float | None, to_s: float | None) -> tuple[float, float]:
    """Where the window begins and ends; raises MemboundError where that is no window."""
    for option, value in (("--from", from_s), ("--to", to_s)):
        if value is not None and not 0 <= value < math.inf:
            raise MemboundError(f"option {option} is {value:g}; give seconds from 0 on")
    begin_s, stop_s = from_s or 0.0, math.inf if to_s is None else to_s
    if stop_s <= begin_s:
        raise MemboundError(f"the window is {begin_s:g} s to {stop_s:g} s; --from must be below --to")
    return begin_s, stop_s


def _notes(result: RunResult, log: PhaseLog | None) -> list[str]:
    notes = []
    if log is None and result.summary.preemptions:
        notes.append(
            f"{result.summary.preemptions} preemptions are not shown: the result does not say when they happened"
        )
    if rejected := result.summary.rejected:
        notes.append(f"{rejected} requests were turned away and are not shown")
    return notes


def _within(moments_s: Column, from_s: float, to_s: float) -> NDArray[np.bool_]:
    return np.asarray((moments_s >= from_s) & (moments_s < to_s))


class _Phases(NamedTuple):
    """All phases of a run as columns, in order of their begin; `phase` is an index into PHASES."""

    request: NDArray[np.int64]
    phase: NDArray[np.int64]
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]

    def slices(self, keep: NDArray[np.bool_]) -> list[Slice]:
        columns = [column[keep].tolist() for column in self]
        return [Slice(id, PHASES[phase], start_s, s) for id, phase, start_s, s in zip(*columns, strict=True)]


def _phases(requests: dict[str, Column], log: PhaseLog | None) -> _Phases:
    """Every completed request's phases."""
    changes = {} if log is None else log.changes
    done = requests["completed"]
    ids, *times = (requests[name][done] for name in ("id", "arrival_s", "admitted_s", "first_token_s", "finished_s"))
    plain = ~np.isin(ids, list(changes))
    rows = [
        np.stack([ids[plain], np.full(int(plain.sum()), index), begin_s[plain], end_s[plain] - begin_s[plain]], axis=1)
        for index, (begin_s, end_s) in enumerate(pairwise(times))
    ]
    several = [row for at in np.flatnonzero(~plain) for row in _slices(int(ids[at]), [t[at] for t in times], changes)]
    rows.append(np.array(several, dtype=float).reshape(-1, 4))
    request, phase, start_s, duration_s = np.concatenate(rows).T
    order = np.argsort(start_s, kind="stable")
    order = order[duration_s[order] > 0]
    return _Phases(request[order].astype(np.int64), phase[order].astype(np.int64), start_s[order], duration_s[order])


def _slices(
    id: int, times_s: Sequence[float], log: dict[int, list[tuple[float, Phase]]]
) -> Iterator[tuple[int, int, float, float]]:
    """Each stretch between two changes of a request that was preempted; what changes into the same goes on."""
    arrival_s, admitted_s, first_s, finished_s = times_s
    changes: list[tuple[float, Phase]] = [(arrival_s, "queued"), (admitted_s, "prefill"), (first_s, "decode")]
    changes = sorted([*changes, *log[id]], key=lambda change: change[0])
    told = [change for before, change in pairwise([(0.0, None), *changes]) if before[1] != change[1]]
    for (start_s, phase), (end_s, _) in pairwise([*told, (finished_s, None)]):
        assert phase is not None, "only the end has no phase"
        yield id, PHASES.index(phase), start_s, end_s - start_s


def _lanes(starts_s: Column, durations_s: Column) -> NDArray[np.int64]:
    """The lowest free lane for each slice, in order of their begin."""
    lanes = np.zeros(len(starts_s), dtype=np.int64)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    rounded = np.round(starts_s, _MOMENT_DIGITS), np.round(starts_s + durations_s, _MOMENT_DIGITS)
    for index, (start_s, end_s) in enumerate(zip(*(times.tolist() for times in rounded), strict=True)):
        while busy and busy[0][0] <= start_s:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        lanes[index] = lane
        heappush(busy, (end_s, lane))
    return lanes


def _counters(steps: dict[str, Column], phases: _Phases) -> tuple[Column, dict[str, Column]]:
    """Running and waiting requests and KV blocks in use, at every moment at which one of them changes."""
    starts, ends = steps["start_s"], steps["start_s"] + steps["time_s"]
    changes: list[tuple[Column, Column, int]] = [(starts, steps["blocks_used"], 2), (ends, -steps["blocks_used"], 2)]
    for counter, counted in enumerate((("prefill", "decode"), ("queued", "preempted"))):
        of = np.isin(phases.phase, [PHASES.index(phase) for phase in counted])
        begins, one = phases.start_s[of], np.ones(int(of.sum()))
        changes += [(begins, one, counter), (begins + phases.duration_s[of], -one, counter)]
    at = np.round(np.concatenate([change[0] for change in changes]), _MOMENT_DIGITS)
    moments, places = np.unique(at, return_inverse=True)
    deltas = np.zeros((3, len(moments)))
    kinds = np.repeat([change[2] for change in changes], [len(change[0]) for change in changes])
    np.add.at(deltas, (kinds, places), np.concatenate([change[1] for change in changes]))
    values = np.round(np.cumsum(deltas, axis=1), 6)
    names = ("running", "waiting", "kv_blocks")
    return moments, {name: np.abs(column) for name, column in zip(names, values, strict=True)}
