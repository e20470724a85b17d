"""What disturbed a run, and which runs can be compared?"""

from __future__ import annotations

from collections.abc import Iterable

from membound.roofline.hardware.calibration import one_state
from membound.roofline.results.result import RunResult

STALLED = "stalled"  # other programs held up its threads
ELSEWHERE = "elsewhere"  # memory was in another state of this machine than when it was calibrated
# A stalled step takes about half as long again, so one in twenty moves a mean by two or three hundredths.
STALLS_PER_STEP = 0.05

Pair = tuple[RunResult, RunResult]


def problem_of(run: RunResult) -> str | None:
    """The worst that disturbed a run, if anything did."""
    memory = run.provenance.memory
    if memory is not None and not memory.as_calibrated:
        return ELSEWHERE
    return STALLED if run.provenance.stalls > STALLS_PER_STEP * len(run.steps["time_s"]) else None


def comparable(measured: Iterable[Pair]) -> list[Pair]:
    """The pairs whose runs both had the memory of the calibration; else those that had the same; else all."""
    pairs = list(measured)
    as_calibrated = [pair for pair in pairs if ELSEWHERE not in map(problem_of, pair)]
    return as_calibrated or [pair for pair in pairs if _same_memory(*pair)] or pairs


def _same_memory(one: RunResult, other: RunResult) -> bool:
    known = [run.provenance.memory for run in (one, other)]
    rates = [rate for memory in known if memory is not None for rate in (memory.before, memory.after)]
    return one_state(min(rates), max(rates))
