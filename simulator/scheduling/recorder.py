"""What happened, step by step and request by request?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from membound.roofline.result import Column
from membound.roofline.shape import StepShape
from membound.simulator.scheduling.request import Outcome, Sequence, Step

STEP_COLUMNS = (
    "start_s",
    "time_s",
    *StepShape.__dataclass_fields__,
    "drafted",
    "accepted",
    "emitted",
    "blocks_used",
)

Observer = Callable[[Step, Outcome, float], None]


class Recorder:
    """Keeps a run's records as they happen; `observer` is told each step, its outcome and when it ended."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.plans: list[Step] = []
        self.idle_s = 0.0
        self.end_s = 0.0
        self.outputs: dict[int, list[int]] = {}
        self._observer = observer
        self._steps: dict[str, list[float]] = {name: [] for name in STEP_COLUMNS}
        self._requests: dict[str, list[float]] = {}
        self._itl_s: list[float] = []

    def idle(self, seconds: float) -> None:
        """The engine had nothing to do for that long."""
        self.idle_s += seconds

    def step(self, step: Step, outcome: Outcome, sequences: dict[int, Sequence], start_s: float, end_s: float) -> None:
        """A step ran from `start_s` to `end_s`; its outcome has been committed to `sequences`."""
        self.plans.append(step)
        self.end_s = end_s
        drafted = accepted = emitted = 0
        for work in step.work:
            sequence = sequences[work.sequence]
            count = len(outcome.emitted[work.sequence])
            drafted += len(work.drafts)
            accepted += count - 1
            emitted += count
            if sequence.admitted_s is None:
                sequence.admitted_s = start_s
            if sequence.first_token_s is None:
                sequence.first_token_s = end_s
            if sequence.last_token_s is not None:
                self._itl_s.append(end_s - sequence.last_token_s)
            sequence.last_token_s = end_s
        shape = StepShape.of((work.start, work.tokens, 1 + len(work.drafts)) for work in step.work)
        self._append(
            self._steps,
            start_s=start_s,
            time_s=end_s - start_s,
            **shape.columns(),
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            blocks_used=step.blocks_used,
        )
        if self._observer:
            self._observer(step, outcome, end_s)

    def completed(self, sequence: Sequence) -> None:
        """`sequence` has emitted its last token."""
        if sequence.token_ids is not None:
            self.outputs[sequence.id] = sequence.token_ids[sequence.request.prompt_tokens :]
        self._request(sequence, finished_s=sequence.last_token_s, completed=True)

    def rejected(self, sequence: Sequence) -> None:
        """`sequence` can never be served."""
        self._request(sequence, finished_s=None, completed=False)

    def requests(self) -> dict[str, Column]:
        """The table of requests in order of their ids; see RunResult."""
        table = {name: np.array(values) for name, values in self._requests.items()}
        order = np.argsort(table["id"], kind="stable")
        counts = ("id", "prompt_tokens", "output_tokens", "preemptions")
        table = {
            name: column[order].astype(np.int64 if name in counts else np.float64) for name, column in table.items()
        }
        return table | {"completed": table["completed"].astype(bool)}

    def steps(self) -> dict[str, Column]:
        """The table of steps in order of time, without the shares of the bounds."""
        return {name: np.array(values, dtype=np.float64) for name, values in self._steps.items()}

    def itl_s(self) -> NDArray[np.float64]:
        return np.array(self._itl_s, dtype=np.float64)

    def _request(self, sequence: Sequence, finished_s: float | None, completed: bool) -> None:
        nan = float("nan")
        self._append(
            self._requests,
            id=sequence.id,
            arrival_s=sequence.request.arrival_s,
            admitted_s=nan if sequence.admitted_s is None else sequence.admitted_s,
            first_token_s=nan if sequence.first_token_s is None else sequence.first_token_s,
            finished_s=nan if finished_s is None else finished_s,
            prompt_tokens=sequence.request.prompt_tokens,
            output_tokens=sequence.emitted,
            preemptions=sequence.preemptions,
            completed=completed,
        )

    @staticmethod
    def _append(table: dict[str, list[float]], **row: float) -> None:
        for name, value in row.items():
            table.setdefault(name, []).append(value)
