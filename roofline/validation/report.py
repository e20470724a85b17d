"""How far are membound's predictions from a table of measurements, and where are they worst?"""

from __future__ import annotations

import csv
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.times.device_fits import fits_for
from membound.roofline.times.kernel_fits import KernelFit, find_fit, spread_on
from membound.roofline.validation import kernel_cases, statements, step_cases
from membound.roofline.validation.kernel_batches import KernelBatch, batches
from membound.roofline.validation.speedups import speedup_of
from membound.roofline.validation.tables import Row, Schema, Table, read_table

# Rows that their collectors or the table's keeper say not to judge by: see what the flag says.
NOT_JUDGED = {
    "suspect": "flagged as suspect by the table",
    "kernel_unoptimised": "the kernel was not optimised",
    "includes_queueing": "contains the queueing of the load generator",
    "kv_capacity_limited": "the stated concurrency does not fit, the real batch is smaller",
    "batch_unknown": "the batch is not stated",
    "server_slo": "bound by a latency objective that the table does not state",
    "host_bound": "bound by the host, not by the device",
    "hf_baseline": "bound by the host, not by the device",
    "eager": "bound by the host, not by the device",
    "offload": "weights or cache are offloaded",
    "low_efficiency_outlier": "an outlier by the table's own words",
    "unidentified": "the configuration is not identified",
}


@dataclass(frozen=True)
class RowResult:
    """A row with what was predicted for it, or with the reason why nothing was."""

    row: Row
    device: str
    model: str
    phase: str
    batch: float | None
    predicted: float | None
    low: float | None
    high: float | None
    reason: str

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        assert self.predicted is not None
        return self.predicted / self.row.measured - 1.0

    @property
    def within(self) -> bool:
        assert self.low is not None and self.high is not None
        return self.low <= self.row.measured <= self.high

    def distance(self) -> float:
        """How far the prediction is off as a ratio, whichever of the two is the larger."""
        assert self.predicted is not None
        return abs(math.log(self.predicted) - math.log(self.row.measured))

    @property
    def judged(self) -> bool:
        """Whether the row says something of the model: neither flagged nor of trust C nor beyond physics."""
        return self.predicted is not None and not self.reason and self.row.text("trust") != "C"


@dataclass(frozen=True)
class Group:
    """Errors of the rows that have something in common."""

    by: dict[str, str]
    n: int
    median_ape: float
    p90_ape: float
    mean_ape: float
    bias: float
    within_interval: float

    @classmethod
    def of(cls, by: dict[str, str], results: list[RowResult]) -> Group:
        errors = np.array([result.error for result in results])
        off = np.abs(errors)
        return cls(
            by,
            len(results),
            float(np.median(off)),
            float(np.quantile(off, 0.9)),
            float(np.mean(off)),
            float(np.median(errors)),
            float(np.mean([result.within for result in results])),
        )


@dataclass(frozen=True)
class ValidationReport:
    """Predictions for a table's rows; the groups and the worst are of the rows that are judged."""

    path: Path
    schema: Schema
    header: tuple[str, ...]
    results: tuple[RowResult, ...]

    @property
    def rows(self) -> int:
        return len(self.results)

    @cached_property
    def judged(self) -> list[RowResult]:
        return [result for result in self.results if result.judged]

    @property
    def predicted(self) -> int:
        return sum(result.predicted is not None for result in self.results)

    @property
    def refused(self) -> int:
        return self.rows - self.predicted

    @property
    def refusals(self) -> dict[str, int]:
        """Why rows have no prediction, the most frequent reason first."""
        return dict(Counter(r.reason for r in self.results if r.predicted is None).most_common())

    @property
    def set_aside(self) -> dict[str, int]:
        """Why rows with a prediction are not judged, the most frequent reason first."""
        reasons = (r.reason or "trust C" for r in self.results if r.predicted is not None and not r.judged)
        return dict(Counter(reasons).most_common())

    @cached_property
    def groups(self) -> list[Group]:
        """Errors of all judged rows, then by phase, source, device, model, batch, and by device and phase together."""
        found = [Group.of({}, self.judged)] if self.judged else []
        for names in (("phase",), ("source",), ("device",), ("model",), ("batch",), ("device", "phase")):
            parts: dict[tuple[str, ...], list[RowResult]] = defaultdict(list)
            for result in self.judged:
                key = tuple(_value(result, name) for name in names)
                if all(key):
                    parts[key].append(result)
            by_size = {name: place for place, (_, name) in enumerate(_BATCHES) if names == ("batch",)}
            ordered = sorted(parts.items(), key=lambda item: (by_size.get(item[0][0], 0), -len(item[1])))
            found += [Group.of(dict(zip(names, key, strict=True)), members) for key, members in ordered]
        return found

    @property
    def worst(self) -> list[RowResult]:
        """The ten judged rows that are furthest off, in ratio."""
        return sorted(self.judged, key=RowResult.distance, reverse=True)[:10]

    def write_rows(self, path: Path) -> None:
        """Writes every input column with predicted, low, high and reason; raises MemboundError where it cannot."""
        try:
            if path.exists() and os.path.samefile(path, self.path):
                raise MemboundError(f"--rows '{path}' is the table itself; give another file")
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*self.header, "predicted", "low", "high", "reason"])
                writer.writeheader()
                for result in self.results:
                    numbers = {name: getattr(result, name) for name in ("predicted", "low", "high")}
                    shown = {name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()}
                    writer.writerow({**result.row.columns, **shown, "reason": result.reason})
        except OSError as error:
            raise MemboundError(f"--rows '{path}' cannot be written: {error.strerror or error}") from None


def validate_table(path: Path) -> ValidationReport:
    """Predicts every row of a table without looking at its value.

    Raises MemboundError for a file that is neither of the two schemas; a row that cannot be predicted has a reason.
    """
    table = read_table(path)
    results = _operators(table) if table.schema == "operators" else _end_to_end(table)
    return ValidationReport(path, table.schema, table.header, tuple(results))


def _value(result: RowResult, name: str) -> str:
    if name == "batch":
        return "" if result.batch is None else _batch_class(result.batch)
    if name == "source":
        return result.row.text("source")
    return str(getattr(result, name))


_BATCHES = (
    *((1.0, "1"), (4.0, "2 to 4"), (16.0, "5 to 16"), (64.0, "17 to 64"), (256.0, "65 to 256")),
    (math.inf, "above 256"),
)


def _batch_class(batch: float) -> str:
    return next(name for bound, name in _BATCHES if batch <= bound)


def _refused(row: Row, error: MemboundError) -> RowResult:
    device, model = row.text("gpu"), row.text("model")
    return RowResult(row, device, model, "", None, None, None, None, str(error))


def _interval(predicted: float, spread: float) -> tuple[float, float]:
    return predicted * float(np.exp(-spread)), predicted * float(np.exp(spread))


def _operators(table: Table) -> list[RowResult]:
    cases, refused = [], {}
    for row in table.rows:
        try:
            cases.append(kernel_cases.case_of(row))
        except MemboundError as error:
            refused[row.line] = _refused(row, error)
    results: dict[int, RowResult] = dict(refused)
    for batch in batches(cases):
        try:
            fit = find_fit(fits_for(batch.hardware), batch.hardware, batch.family, batch.kernel, batch.library)
            predictions = list(kernel_results(batch, fit))
        except MemboundError as error:
            predictions = [_refused(case.row, error) for case in batch.cases]
        results |= {result.row.line: result for result in predictions}
    return [results[row.line] for row in table.rows]


def kernel_results(batch: KernelBatch, fit: KernelFit) -> Iterable[RowResult]:
    """The rows of a batch under one fit."""
    seconds, bound = batch.predict(fit.parameters), batch.bound_s()
    for case, predicted_s, bound_s in zip(batch.cases, seconds, bound, strict=True):
        try:
            predicted = _checked(float(predicted_s) * 1e6, case.row)
        except MemboundError as error:
            yield _refused(case.row, error)
            continue
        low, high = _interval(predicted, spread_on(fit, batch.hardware))
        reason = ""
        if case.measured_s < bound_s:
            reason = "measured faster than the device's roofs allow for the stated amounts"
        elif case.is_best_of_many:
            reason = "the best of a search over shapes, not a usual kernel"
        tokens = case.amounts.get("m", case.amounts.get("tokens", case.amounts.get("batch")))
        phase = batch.family if batch.family != "gemm" else _gemm_phase(case.amounts["m"])
        name = batch.operation if batch.family == "collective" else case.row.text("model")
        yield RowResult(case.row, batch.hardware.name, name, phase, tokens, predicted, low, high, reason)


def _gemm_phase(m: float) -> str:
    """Which roof holds a GEMM of m rows."""
    return "gemm m <= 16" if m <= 16 else "gemm m >= 1024" if m >= 1024 else "gemm between"


def _end_to_end(table: Table) -> list[RowResult]:
    results = []
    for row in table.rows:
        try:
            results.append(_step_result(row))
        except MemboundError as error:
            results.append(_refused(row, error))
    return results


def _step_result(row: Row) -> RowResult:
    case = None
    if row.text("metric") == "speedup_x":
        predicted, spread, device, model = speedup_of(row)
        phase, batch = "ratio", statements.batch(row)
    else:
        case = step_cases.case_of(row)
        predicted, spread, phase, batch = case.predict(), case.spread, case.phase, case.batch
        device, model = case.deployment.hardware.name, case.deployment.model.name
    low, high = _interval(_checked(predicted, row), spread)
    reason = _why_not_judged(row.columns)
    if not reason and case is not None and not case.is_possible():
        reason = "measured faster than the device's roofs allow for the stated load"
    return RowResult(row, device, model, phase, batch, predicted, low, high, reason)


def _checked(predicted: float, row: Row) -> float:
    """The prediction; raises MemboundError where the row's amounts lead to none."""
    if not np.isfinite(predicted) or predicted <= 0:
        raise MemboundError(f"{row.at('the prediction')} is {predicted:g}; not above 0, so the row's amounts are wrong")
    return predicted


def _why_not_judged(columns: Mapping[str, Any]) -> str:
    flags = str(columns.get("flags", "")).split(";")
    return next((NOT_JUDGED[flag] for flag in flags if flag in NOT_JUDGED), "")
