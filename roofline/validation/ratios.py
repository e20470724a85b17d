"""Does membound predict what a change brings: other formats, an FP8 cache, more devices, speculation?

    python -m membound.roofline.validation.ratios TABLE.csv

An end-to-end table implies a ratio wherever two of its rows differ in one thing only; rows of `speedup_x` state one.
Ratios are speeds: above 1 the change is faster.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.precision.names import parse_precision
from membound.roofline.ratio_error import Timed, kernels_of, ratio_error
from membound.roofline.shape import StepShape
from membound.roofline.validation.report import NOT_JUDGED, RowResult, ValidationReport, validate_table
from membound.roofline.validation.step_cases import StepCase, case_of

# A measured ratio this near to 1 says neither faster nor slower.
NO_SIGN = 0.03
# A speed-up over a slow baseline is a ratio all the same: both sides wait for the same host.
_RATIOS_HOLD = ("hf_baseline", "host_bound", "eager")
_RUN = ("source", "engine", "engine_version", "gpu", "pp", "model", "batch_or_concurrency", "input_len", "output_len")
# What rows of a pair have in common beside the run, and what may differ.
_SAME: dict[str, tuple[str, ...]] = {
    "weights": ("n_gpu", "tp", "kv_dtype"),
    "kv cache": ("n_gpu", "tp", "weight_dtype", "act_dtype"),
    "tensor parallelism": ("weight_dtype", "act_dtype", "kv_dtype", "technique"),
}


@dataclass(frozen=True)
class Ratio:
    """The speed of a changed run over that of its baseline, and the rows that it comes from."""

    kind: str
    phase: str
    lines: tuple[int, ...]
    source: str
    change: str
    predicted: float
    measured: float
    interval: float | None = None

    @property
    def within(self) -> bool | None:
        """Whether the measured ratio lies in the predicted one's interval; None for a ratio that a row states."""
        if self.interval is None:
            return None
        return abs(math.log(self.predicted / self.measured)) <= math.log1p(self.interval)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def has_sign(self) -> bool:
        return abs(math.log(self.measured)) > math.log1p(NO_SIGN)

    @property
    def sign_is_right(self) -> bool:
        return (self.predicted > 1.0) == (self.measured > 1.0)


@dataclass(frozen=True)
class RatioGroup:
    """Ratios of one kind: how many have a sign and in which share it is right, their errors, and the share of those
    with an interval that lie in it."""

    kind: str
    phase: str
    n: int
    signed: int
    right_sign: float
    median_ape: float
    p90_ape: float
    within: float | None

    @classmethod
    def of(cls, kind: str, phase: str, ratios: Sequence[Ratio]) -> RatioGroup:
        signed = [ratio.sign_is_right for ratio in ratios if ratio.has_sign]
        off = np.abs([ratio.error for ratio in ratios])
        right = float(np.mean(signed)) if signed else 1.0
        held = [ratio.within for ratio in ratios if ratio.within is not None]
        within = float(np.mean(held)) if held else None
        median, p90 = (float(np.quantile(off, share)) for share in (0.5, 0.9))
        return cls(kind, phase, len(ratios), len(signed), right, median, p90, within)


def ratios(report: ValidationReport) -> list[Ratio]:
    """Every ratio that a validated end-to-end table implies between its judged rows or states.

    Raises MemboundError for a table of operators.
    """
    if report.schema != "end_to_end":
        raise MemboundError(f"table '{report.path}' is of operators; ratios are of whole runs")
    judged = [result for result in report.judged if result.phase != "ratio" and result.row.text("metric")]
    plain = [result for result in judged if "specul" not in result.row.text("technique").lower()]
    return [
        *_pairs("weights", plain, lambda result: -_bits(result, "weight_dtype")),
        *_pairs("kv cache", plain, lambda result: -_bits(result, "kv_dtype")),
        *_pairs("tensor parallelism", plain, lambda result: result.row.number("tp") or math.nan),
        *_stated(report),
    ]


def _bits(result: RowResult, column: str) -> float:
    """Bits of an element; not a number where the row does not say."""
    format = parse_precision(result.row.text(column), "kv" if column == "kv_dtype" else "weights")
    return math.nan if format is None else float(format.width)


def _pairs(kind: str, results: Sequence[RowResult], order: Callable[[RowResult], float]) -> list[Ratio]:
    """Each row against the first by `order` (the widest format, the fewest devices) of those that share the rest."""
    groups: dict[tuple[str, ...], list[tuple[float, RowResult]]] = defaultdict(list)
    for result in results:
        place = order(result)
        if not math.isnan(place):
            key = tuple(result.row.text(column) for column in (*_RUN, *_SAME[kind], "metric", "flags"))
            groups[key].append((place, result))
    found = []
    for members in groups.values():
        members.sort(key=lambda member: (member[0], member[1].row.line))
        first, baseline = members[0]
        found += [_ratio(kind, baseline, other) for place, other in members[1:] if place > first]
    return [ratio for ratio in found if ratio is not None]


def _ratio(kind: str, baseline: RowResult, changed: RowResult) -> Ratio | None:
    """The pair's ratio; None where parallelism differs in more than its tensor-parallel degree."""
    if kind == "tensor parallelism" and _beside_tp(baseline) != _beside_tp(changed):
        return None
    assert baseline.predicted is not None and changed.predicted is not None
    column = {"weights": "weight_dtype", "kv cache": "kv_dtype"}.get(kind, "tp")
    rate = any(unit in changed.row.text("metric") for unit in ("tok_s", "req_s"))
    exponent = 1.0 if rate else -1.0
    predicted = (changed.predicted / baseline.predicted) ** exponent
    return Ratio(
        kind,
        changed.phase,
        (baseline.row.line, changed.row.line),
        changed.row.text("source"),
        f"{baseline.row.text(column)} to {changed.row.text(column)}",
        predicted,
        (changed.row.measured / baseline.row.measured) ** exponent,
        _interval(baseline, changed, predicted),
    )


def _interval(baseline: RowResult, changed: RowResult, ratio: float) -> float:
    """The relative interval of a predicted ratio, by the steps that most of both runs are made of."""
    (before, first), (after, second) = (_timed(case_of(result.row)) for result in (baseline, changed))
    return ratio_error(max(first, second), before, after, ratio)


def _timed(case: StepCase) -> tuple[Timed, float]:
    deployment, batch = case.deployment, max(case.batch, 1.0)
    if case.phase == "prefill":
        shape = StepShape.prefill(batch, case.prompt_tokens, 0.0)
    else:
        shape = StepShape.decode(batch, case.prompt_tokens + case.output_tokens / 2)
    cost = deployment.step(shape)
    shares = {bound: float(share) for bound, share in cost.shares().items()}
    return Timed(shares, kernels_of(deployment.setup), batch), cost.relative_error


def _beside_tp(result: RowResult) -> tuple[float, int, int, bool]:
    case = case_of(result.row)
    parallel = case.deployment.setup.parallel
    return case.replicas, parallel.pp, parallel.dp, parallel.ep > 1


def _stated(report: ValidationReport) -> list[Ratio]:
    """Rows that give a speed-up themselves."""
    found = []
    for result in report.results:
        flags = set(result.row.text("flags").split(";")) & set(NOT_JUDGED) - set(_RATIOS_HOLD)
        if result.phase != "ratio" or result.predicted is None or flags or result.row.text("trust") == "C":
            continue
        technique = result.row.text("technique")
        kind = "speculation" if "specul" in technique.lower() else "stated speed-ups of formats"
        row = result.row
        found.append(Ratio(kind, "ratio", (row.line,), row.text("source"), technique, result.predicted, row.measured))
    return found


def groups(found: Sequence[Ratio]) -> list[RatioGroup]:
    """All ratios, then by kind, then by kind and phase where a kind has several phases."""
    if not found:
        return []
    made = [RatioGroup.of("all", "", found)]
    for kind in dict.fromkeys(ratio.kind for ratio in found):
        members = [ratio for ratio in found if ratio.kind == kind]
        made.append(RatioGroup.of(kind, "", members))
        phases = sorted({ratio.phase for ratio in members})
        if len(phases) > 1:
            made += [RatioGroup.of(kind, phase, [r for r in members if r.phase == phase]) for phase in phases]
    return made


def markdown(found: Sequence[Ratio]) -> str:
    """The groups as a table."""
    lines = [
        "| change | phase | ratios | with a sign | sign right | median error | 90 % within | in the interval |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for g in groups(found):
        right = f"{g.right_sign:.1%}" if g.signed else "-"
        phase = g.phase or "any"
        held = "-" if g.within is None else f"{g.within:.0%}"
        errors = f"{g.median_ape:.1%} | {g.p90_ape:.1%}"
        lines.append(f"| {g.kind} | {phase} | {g.n} | {g.signed} | {right} | {errors} | {held} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Prints the table of ratios of the one file that the arguments name."""
    if len(arguments) != 1:
        sys.exit("give one file: python -m membound.roofline.validation.ratios TABLE.csv")
    try:
        print(markdown(ratios(validate_table(Path(arguments[0])))))
    except MemboundError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
