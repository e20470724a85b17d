"""How is a scenario measured at another server, and compared with its prediction?

The scenario says what the server is taken for: its hardware, engine profile and techniques are what is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from membound.app.compare import ComparisonResult
from membound.app.listener import Listener
from membound.app.text import digits, seconds
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.results.comparison import baseline_row, spread
from membound.roofline.results.result import Distribution, RunResult, Summary
from membound.roofline.scenario import Scenario
from membound.roofline.times.known import times_for
from membound.runtime.endpoint.address import Endpoint
from membound.runtime.endpoint.measure import measure as measure_at
from membound.runtime.endpoint.measure import need_answers
from membound.simulator.drafting import with_best_drafts
from membound.simulator.run import certainty_of
from membound.simulator.run import run as simulate

if TYPE_CHECKING:
    from rich.console import RenderableType

# What a client sees: a key of the summary, which number of a distribution, and its unit.
_METRICS = (
    *(("tpot_s", "mean", "s"), ("ttft_s", "mean", "s"), ("ttft_s", "p99", "s"), ("e2e_s", "mean", "s")),
    ("output_tokens_per_s", None, "tokens/s"),
)


@dataclass
class EndpointComparison(ComparisonResult):
    """A comparison with one row a point, and beside it every metric that a client sees."""

    metrics: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, point: dict[str, Any], predicted: RunResult, measured: list[RunResult], whence: str) -> None:
        """Adds a point with its prediction and the repeats of its measurement."""
        scenario, index = predicted.scenario, len(self.predicted)
        times = times_for(get_hardware(scenario.hardware), scenario.setup.profile)
        certainty = certainty_of(resolve_model(scenario.model), scenario.setup, times, predicted.steps)
        relative_error = certainty.relative_error
        self.predicted[index, "baseline"], self.measured[index, "baseline"] = predicted, measured
        conditions = f"{_conditions(scenario)}, {whence}"
        self.rows.append(baseline_row(predicted, measured, relative_error, point, conditions))
        rows = list(_metric_rows(predicted.summary, [run.summary for run in measured], relative_error, point))
        if other := _other_load(predicted, measured[-1]):
            rows = [row | {"error": None} for row in rows]
            self.notes.append(other)
        self.metrics += rows
        self.notes += [note for note in measured[-1].provenance.notes if note not in self.notes]

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"metrics": self.metrics}


def compare(scenario: Scenario, endpoint: Endpoint, listener: Listener) -> EndpointComparison:
    """Predicts each point of the sweep for the scenario's hardware and engine, and measures it `repeats` times."""
    result = EndpointComparison([], {}, {})
    points = list(scenario.points())
    cells = len(points) * scenario.repeats
    for index, (values, asked) in enumerate(points):
        listener.progress(index / len(points), "predicting")
        predicted = predict(asked)
        measured = []
        for repeat in range(scenario.repeats):
            done = index * scenario.repeats + repeat

            def progress(fraction: float, message: str, done: int = done) -> None:
                listener.progress((done + fraction) / cells, f"{message} (run {done + 1} of {cells})")

            run = measure_at(asked, endpoint, progress, listener.event)
            need_answers(run)
            measured.append(run)
        result.judge(values, predicted, measured, f"against {endpoint.base_url}, {scenario.repeats} repeats")
    return result


def predict(scenario: Scenario) -> RunResult:
    """The scenario simulated, with the best drafts where it leaves their length open."""
    return simulate(with_best_drafts(scenario).scenario)


def _metric_rows(
    predicted: Summary, measured: list[Summary], relative_error: float, point: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Each metric that both have, the measured one as the median of the repeats."""
    for metric, statistic, unit in _METRICS:
        expected = _value(predicted, metric, statistic)
        samples = [value for one in measured if (value := _value(one, metric, statistic)) is not None]
        if not expected or not samples:
            continue
        median = float(np.median(samples))
        yield {
            "point": point,
            "metric": metric,
            "statistic": statistic,
            "unit": unit,
            "predicted": expected,
            "low": expected / (1 + relative_error),
            "high": expected * (1 + relative_error),
            "measured": median,
            "spread": spread(samples),
            "error": expected / median - 1 if median else None,
            "samples": samples,
        }


# Relative difference in the tokens of a request from which on two runs are not of one load.
_OTHER = 0.1


def _other_load(predicted: RunResult, measured: RunResult) -> str | None:
    """That the server served another load than the one that is predicted, so that no error is the prediction's."""
    if not (predicted.summary.completed and len(measured.requests["id"]) and measured.requests["completed"].any()):
        return None  # results of other tools may have means alone
    asked, served = (
        [float(run.requests[name][run.requests["completed"]].mean()) for name in ("prompt_tokens", "output_tokens")]
        for run in (predicted, measured)
    )
    if all(abs(got / wished - 1.0) <= _OTHER for got, wished in zip(served, asked, strict=True)):
        return None
    return (
        f"no errors are given: the server read {served[0]:.0f} tokens and wrote {served[1]:.0f} of a request, and "
        f"{asked[0]:.0f} and {asked[1]:.0f} are predicted; give the scenario the lengths that the server sees"
    )


def _value(summary: Summary, metric: str, statistic: str | None) -> float | None:
    value = getattr(summary, metric)
    found: float | None = getattr(value, statistic) if isinstance(value, Distribution) and statistic else value
    return found


def _conditions(scenario: Scenario) -> str:
    techniques = ", ".join(technique.name for technique in scenario.techniques) or "no technique"
    return f"{scenario.model} on {scenario.hardware} as engine '{scenario.engine.profile}' with {techniques}"


def comparison(document: dict[str, Any]) -> RenderableType:
    """Predicted beside measured, a table for each point and a row for each metric."""
    from rich.console import Group

    tables = [_table(point, list(rows)) for point, rows in groupby(document["metrics"], lambda row: row["point"])]
    conditions = list(dict.fromkeys(row["conditions"] for row in document["comparisons"]))
    return Group(*tables, *conditions, *document["notes"])


def _table(point: dict[str, Any], rows: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    at = ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in point.items())
    table = Table(title=at or None, box=None, pad_edge=False)
    for column in ("", "predicted", "interval", "measured", "error"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        shown = seconds if row["unit"] == "s" else digits
        table.add_row(
            " ".join(filter(None, (row["metric"], row["statistic"]))),
            shown(row["predicted"]),
            f"{shown(row['low'])} to {shown(row['high'])}",
            shown(row["measured"]) + ("" if row["spread"] is None else f" ± {shown(row['spread'])}"),
            "" if row["error"] is None else f"{row['error']:+.1%}",
        )
    return table
