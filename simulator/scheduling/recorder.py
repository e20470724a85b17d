"""What happened, step by step and request by request?

Equal steps that ran as one are one row, and rows are joined where there are very many: what a run costs in memory
grows with its requests, not with its tokens. The sums over rows, and so the summary, do not depend on that.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from membound.roofline.results.result import BOUNDS, Column
from membound.roofline.results.samples import Samples
from membound.roofline.shape import AMOUNTS, StepShape
from membound.roofline.within import Within, columns_within
from membound.simulator.scheduling.request import Outcome, Sequence, Step, drafts_of

SUMMED = ("time_s", "steps", "drafted", "accepted", "emitted")
COUNTED_COLUMNS = ("start_s", *SUMMED, "moved_blocks", "cached_tokens", "blocks_used", "held_tokens", *AMOUNTS)
REQUEST_COLUMNS = (
    "id",
    "arrival_s",
    "admitted_s",
    "first_token_s",
    "finished_s",
    "prompt_tokens",
    "output_tokens",
    "preemptions",
    "cached_tokens",
    "service_class",
    "completed",
)
_WITHIN_ROW = struct.Struct(f"{len(Within._fields) - 1}d").pack
_STEP_ROW, _REQUEST_ROW = (struct.Struct(f"{len(names)}d").pack for names in (COUNTED_COLUMNS, REQUEST_COLUMNS))
_SUMS = [COUNTED_COLUMNS.index(name) for name in (*SUMMED, "moved_blocks", "cached_tokens")]
_FIRST_SHAPE = COUNTED_COLUMNS.index(AMOUNTS[0])
_COUNTS = ("id", "prompt_tokens", "output_tokens", "preemptions", "cached_tokens", "service_class")

# Rows whose bounds are worked out together, and rows that are kept at most.
_CHUNK = 1 << 13
MOST_ROWS = 1 << 18

Observer = Callable[[Step, Outcome, float], None]
Bounds = Callable[[StepShape], dict[str, Column]]
NAN = float("nan")


class Recorder:
    """Keeps a run's records as they happen; `observer` is told each step, its outcome and when it ended.

    `bounds` gives the share of each bound in the time of steps of some shapes. With `keep_plans` every step is kept.
    The steps of a model whose layers look back over `windows` only have columns of what these see.
    """

    def __init__(
        self, observer: Observer | None = None, bounds: Bounds | None = None, keep_plans: bool = False
    ) -> None:
        self.plans: list[Step] = []
        self.idle_s = 0.0
        self.end_s = 0.0
        self.outputs: dict[int, list[int]] = {}
        self.rejections: dict[int, str] = {}
        self.itl_s = Samples()
        self.bounds = bounds
        self.windows: tuple[int, ...] = ()
        self._row_bytes = 8 * len(COUNTED_COLUMNS)
        self._observer = observer
        self._keep_plans = keep_plans
        self._drafts: Counter[tuple[int, int]] = Counter()  # by how long they were, and how much of them was right
        self._rows = bytearray()
        self._tables: list[NDArray[np.float64]] = []
        self._requests = bytearray()
        # Who decodes: those that have emitted nothing since they joined, with the time of their last token, and others.
        self._joined: dict[int, float] = {}
        self._decoding: set[int] = set()
        self._decoded_s = 0.0

    def idle(self, seconds: float) -> None:
        """The engine had nothing to do for that long."""
        self.idle_s += seconds

    def step(
        self,
        step: Step,
        outcome: Outcome,
        usage: tuple[float, float],
        sequences: dict[int, Sequence],
        start_s: float,
        end_s: float,
    ) -> None:
        """A step, or equal ones, ran from `start_s` to `end_s`; the outcome has been committed to `sequences`.

        `usage` is block-seconds in use, and token-seconds held in them.
        """
        self.end_s = end_s
        if self._keep_plans:
            self.plans.append(step)
        for id in step.preempted:
            self._left(sequences[id])
        for id in step.admitted:
            sequence = sequences[id]
            if sequence.admitted_s is None:
                sequence.admitted_s = start_s
        for id in step.resumed:
            last_s = sequences[id].last_token_s
            assert last_s is not None, "what goes on has begun"
            self._joined[id] = last_s
        if step.decoding:
            self._decoded(step, outcome, start_s, end_s)
        emitted = step.decoding * outcome.steps
        for work in step.prompts:
            if work.emits:
                self._prompt_ended(sequences[work.sequence], end_s)
                emitted += 1
        drafted = 0
        if step.guesses or (outcome.emitted is not None and step.work):
            drafted = step.drafted
            if drafted:
                if step.guesses:
                    self._drafts.update(zip([count for _, count in step.guesses], outcome.accepted, strict=True))
                else:
                    self._drafts.update([(length, right) for _, length, right in drafts_of(step, outcome)])
            if outcome.emitted is None:
                emitted += sum(outcome.accepted)
            else:
                emitted = sum(len(outcome.emitted[work.sequence]) for work in step.work if work.emits)
        self._row(step, outcome, usage, start_s, end_s - start_s, drafted, emitted)
        if self._observer:
            self._observer(step, outcome, end_s)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the drafts that are so long, the share whose guesses up to each position were accepted."""
        longest = max((length for length, _ in self._drafts), default=0)
        reached, right = np.zeros(longest), np.zeros(longest)
        for (length, accepted), count in self._drafts.items():
            reached[:length] += count
            right[:accepted] += count
        return tuple((right / reached).tolist())

    def completed(self, sequence: Sequence) -> None:
        """`sequence` has emitted its last token."""
        self._left(sequence)
        if sequence.token_ids is not None:
            self.outputs[sequence.id] = sequence.token_ids[sequence.request.prompt_tokens :]
        assert sequence.last_token_s is not None, "a completed request has a last token"
        self._request(sequence, sequence.last_token_s, 1.0)

    def rejected(self, sequence: Sequence) -> None:
        """`sequence` was turned away."""
        self.refused(sequence.id, sequence.reason)
        self._request(sequence, NAN, 0.0)

    def refused(self, id: int, reason: str | None) -> None:
        """Why a request was turned away; the first ones are enough to tell."""
        if len(self.rejections) < 100:
            self.rejections[id] = reason or ""

    def add_steps(self, table: NDArray[np.float64], windows: tuple[int, ...] = ()) -> None:
        """Many steps at once, as rows of COUNTED_COLUMNS and those of `windows`, that follow those before."""
        if len(table):
            self._see(windows)
        width = self._row_bytes
        while len(table):
            room = _CHUNK - len(self._rows) // width if self.bounds else len(table)
            self._rows += table[:room].tobytes()
            table = table[room:]
            if self.bounds and len(self._rows) >= _CHUNK * width:
                self._flush()

    def add_requests(self, table: NDArray[np.float64]) -> None:
        """Many requests that have ended or were turned away, as rows of REQUEST_COLUMNS."""
        self._requests += table.tobytes()

    @classmethod
    def joined(cls, recorders: list[Recorder]) -> Recorder:
        """The records of several engines that ran at the same time as one; an engine that has ended is idle."""
        whole = cls(recorders[0]._observer, recorders[0].bounds)
        whole.end_s = max(recorder.end_s for recorder in recorders)
        for recorder in recorders:
            recorder._flush()
            whole._tables += recorder._tables
            whole._see(whole.windows or recorder.windows)
            whole._requests += recorder._requests
            whole.itl_s.extend(recorder.itl_s)
            whole.outputs |= recorder.outputs
            whole.rejections |= recorder.rejections
            whole._drafts.update(recorder._drafts)
            whole.idle_s += whole.end_s - sum(float(table[:, 1].sum()) for table in recorder._tables)
        if whole._tables:
            table = np.concatenate(whole._tables)
            whole._tables = [table[np.argsort(table[:, 0], kind="stable")]]
        return whole

    def to_arrays(self) -> dict[str, NDArray[np.float64]]:
        """Steps, requests and gaps, to be read elsewhere by `from_arrays`, without outputs and bounds."""
        assert self.bounds is None, "bounds are worked out where the records are read"
        return {
            "steps": np.frombuffer(bytes(self._rows), dtype=np.float64),
            "requests": np.frombuffer(bytes(self._requests), dtype=np.float64),
            "itl_s": self.itl_s.to_array(),
            "seconds": np.array([self.end_s, self.idle_s]),
            "windows": np.array(self.windows, dtype=np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.float64]], bounds: Bounds | None = None) -> Recorder:
        """The records that `to_arrays` wrote."""
        recorder = cls(bounds=bounds)
        recorder._rows += arrays["steps"].tobytes()
        recorder._requests += arrays["requests"].tobytes()
        recorder.itl_s.extend(Samples.from_array(arrays["itl_s"]))
        recorder.end_s, recorder.idle_s = arrays["seconds"].tolist()
        recorder._see(tuple(map(int, arrays["windows"])))
        return recorder

    def requests(self) -> dict[str, Column]:
        """The table of requests in order of their ids; see RunResult."""
        table = np.frombuffer(self._requests, dtype=np.float64).reshape(-1, len(REQUEST_COLUMNS))
        table = table[np.argsort(table[:, 0], kind="stable")]
        columns = dict(zip(REQUEST_COLUMNS, table.T, strict=True))
        columns = {name: column.astype(np.int64 if name in _COUNTS else float) for name, column in columns.items()}
        return columns | {"completed": columns["completed"].astype(bool)}

    def steps(self) -> dict[str, Column]:
        """The table of steps in order of time; with the share of each bound where `bounds` is known."""
        self._flush()
        names = (*self._columns, *BOUNDS) if self.bounds else self._columns
        table = np.concatenate(self._tables) if self._tables else np.zeros((0, len(names)))
        return {name: np.ascontiguousarray(column) for name, column in zip(names, table.T, strict=True)}

    # -- when tokens came

    def _decoded(self, step: Step, outcome: Outcome, start_s: float, end_s: float) -> None:
        """Everybody who decodes has emitted in each step: a gap since the last token of each."""
        first_end_s = end_s if outcome.steps == 1 else start_s + outcome.first_s
        others = len(self._decoding)
        ramp = 0
        if self._decoded_s == start_s:
            ramp = others
        elif others:
            self.itl_s.add(first_end_s - self._decoded_s, others)
        for last_s in self._joined.values():
            if last_s == start_s:
                ramp += 1
            else:
                self.itl_s.add(first_end_s - last_s)
        if outcome.steps == 1:
            if ramp:
                self.itl_s.add(first_end_s - start_s, ramp)
        elif ramp == step.decoding:
            self.itl_s.add(outcome.first_s, ramp, outcome.steps, outcome.slope_s)
        else:
            if ramp:
                self.itl_s.add(first_end_s - start_s, ramp)
            self.itl_s.add(outcome.first_s + outcome.slope_s, step.decoding, outcome.steps - 1, outcome.slope_s)
        if self._joined:
            self._decoding.update(self._joined)
            self._joined.clear()
        self._decoded_s = end_s

    def _prompt_ended(self, sequence: Sequence, end_s: float) -> None:
        if sequence.first_token_s is None:
            sequence.first_token_s = end_s
        elif sequence.last_token_s is not None:
            self.itl_s.add(end_s - sequence.last_token_s)
        sequence.last_token_s = end_s
        if sequence.status == "running":
            self._joined[sequence.id] = end_s

    def _left(self, sequence: Sequence) -> None:
        """`sequence` no longer decodes, if it did."""
        if sequence.id in self._decoding:
            self._decoding.remove(sequence.id)
            sequence.last_token_s = self._decoded_s
        else:
            self._joined.pop(sequence.id, None)

    # -- rows

    def _row(
        self,
        step: Step,
        outcome: Outcome,
        usage: tuple[float, float],
        start_s: float,
        time_s: float,
        drafted: int,
        emitted: int,
    ) -> None:
        tokens, sequences, kv_tokens, attended, *others = step.sums[: len(AMOUNTS)]
        grown = step.decoding * (outcome.steps - 1) / 2  # the mean step of equal ones attends to so many tokens more
        per_s = 1 / outcome.time_s if outcome.time_s > 0 else 0.0
        accepted = emitted - step.decoding - sum([work.emits for work in step.prompts]) if drafted else 0
        self._rows += _STEP_ROW(
            start_s,
            time_s,
            outcome.steps,
            drafted,
            accepted,
            emitted,
            step.moved_blocks,
            step.cached_tokens,
            usage[0] * per_s,
            usage[1] * per_s,
            tokens,
            sequences,
            kv_tokens + grown,
            attended + grown,
            *others,
        )
        if len(step.sums) > len(AMOUNTS):
            self._row_within(step, outcome)
        if self.bounds and len(self._rows) >= _CHUNK * self._row_bytes:
            self._flush()

    def _row_within(self, step: Step, outcome: Outcome) -> None:
        """The part of the row that says what layers with a window see in the mean step."""
        within: tuple[Within, ...] = step.sums[len(AMOUNTS)]
        self._see(tuple([known.window for known in within]))
        later = (outcome.steps - 1) / 2
        growing = step.growing or (0,) * len(within)
        for (_, decode_tokens, *of_prompts), more in zip(within, growing, strict=True):
            self._rows += _WITHIN_ROW(decode_tokens + more * later, *of_prompts)

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*COUNTED_COLUMNS, *columns_within(self.windows))

    def _see(self, windows: tuple[int, ...]) -> None:
        if windows != self.windows:
            self.windows = windows
            self._row_bytes = 8 * len(self._columns)

    def _flush(self) -> None:
        if not self._rows:
            return
        table = np.frombuffer(bytes(self._rows), dtype=np.float64).reshape(-1, len(self._columns))
        self._rows.clear()
        if self.bounds:
            shares = self.bounds(StepShape.of_columns(dict(zip(self._columns, table.T, strict=True))))
            bounds = np.stack([np.broadcast_to(shares[bound], len(table)) for bound in BOUNDS], axis=1)
            table = np.concatenate([table, bounds], axis=1)
        self._tables.append(table)
        if sum(map(len, self._tables)) > MOST_ROWS:
            table = np.concatenate(self._tables)
            # in pieces that caches hold, since each column is a pass over all of a piece
            shapes = slice(_FIRST_SHAPE, len(self._columns))
            pieces = range(0, len(table), _CHUNK)
            self._tables = [_joined_rows(table[begin : begin + _CHUNK], shapes) for begin in pieces]

    def _request(self, sequence: Sequence, finished_s: float, completed: float) -> None:
        self._requests += _REQUEST_ROW(
            sequence.id,
            sequence.request.arrival_s,
            NAN if sequence.admitted_s is None else sequence.admitted_s,
            NAN if sequence.first_token_s is None else sequence.first_token_s,
            finished_s,
            sequence.request.prompt_tokens,
            sequence.emitted,
            sequence.preemptions,
            sequence.cached_tokens or 0,
            sequence.service_class,
            completed,
        )


def _joined_rows(table: NDArray[np.float64], shapes: slice) -> NDArray[np.float64]:
    """Every two rows as one: counts and seconds summed, `shapes` as means over steps, the rest as means over time."""
    if len(table) % 2:
        table = np.concatenate([table, np.zeros((1, table.shape[1]))])
    first, second = table[0::2], table[1::2]
    joined = _weighted(first, second, "time_s")
    joined[:, shapes] = _weighted(first, second, "steps")[:, shapes]
    joined[:, _SUMS] = first[:, _SUMS] + second[:, _SUMS]
    joined[:, COUNTED_COLUMNS.index("start_s")] = first[:, COUNTED_COLUMNS.index("start_s")]
    return joined


def _weighted(first: NDArray[np.float64], second: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Means of two tables, row by row, where one column is how much a row weighs."""
    index = COUNTED_COLUMNS.index(name)
    share = second[:, index] / (first[:, index] + second[:, index])
    return first * (1 - share)[:, None] + second * share[:, None]
