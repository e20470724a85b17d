"""How is a scenario predicted and measured side by side?

The orchestration only: the simulator predicts, the runtime measures, `roofline.comparison` joins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from membound.app.disturbed import ELSEWHERE, STALLED, comparable, problem_of
from membound.app.listener import Listener
from membound.roofline.hardware import HardwareSpec
from membound.roofline.results.comparison import Comparison, Quality, baseline_row, variant_row
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.variants import Variant
from membound.roofline.scenario.workload import ClosedLoop
from membound.roofline.times.known import times_for
from membound.simulator.run import run as simulate

if TYPE_CHECKING:
    from membound.runtime.engine import Runtime
    from membound.runtime.tokenizer import Tokenizer
    from membound.simulator.scheduling.request import Outcome, Step

BASELINE = "baseline"
LIVE_INTERVAL_S = 0.5
PATIENCE_S = 10.0  # before a turn or a run, until memory is as calibrated
WAITED_SHARE = 0.5  # of the time that the runs took, for all that is waited


@dataclass(frozen=True)
class Point:
    """One point of the sweep: the plain engine there, and the variants that mean something there."""

    values: dict[str, Any]
    plain: Scenario
    variants: tuple[Variant, ...]

    def scenarios(self) -> dict[str, Scenario]:
        """Every engine to run, by name: the plain one, other baselines, and each variant after its own."""
        named = {BASELINE: self.plain}
        for variant in self.variants:
            named[self.baseline_of(variant)] = variant.baseline(self.plain)
            named[variant.name] = variant.scenario(self.plain)
        return named

    def baseline_of(self, variant: Variant) -> str:
        """The name of the engine that a variant is compared with."""
        return " beside ".join([BASELINE, *(one.name for one in variant.beside)])


@dataclass
class ComparisonResult:
    """All rows, and the runs behind them: predicted and measured by point and variant, or `baseline`."""

    rows: list[Comparison]
    predicted: dict[tuple[int, str], RunResult]
    measured: dict[tuple[int, str], list[RunResult]]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """What `membound compare --json` prints."""
        return {"comparisons": [row.model_dump(mode="json") for row in self.rows], "notes": self.notes}


def points_of(scenario: Scenario) -> list[Point]:
    """The sweep's points; a variant that needs a batch is left out where there is a single client."""
    points = []
    for values, at_point in scenario.points():
        arrivals = at_point.workload.arrivals
        alone = isinstance(arrivals, ClosedLoop) and arrivals.concurrency == 1
        variants = tuple(one for one in scenario.compared() if not (alone and one.needs_batch))
        points.append(Point(values, at_point.with_techniques(()), variants))
    return points


def predict_rows(scenario: Scenario, hardware: HardwareSpec) -> ComparisonResult:
    """The rows of a comparison before anything was measured."""
    result = ComparisonResult([], {}, {})
    rows = _Rows(scenario, hardware)
    for index, point in enumerate(points_of(scenario)):
        predicted = {name: simulate(asked, hardware) for name, asked in point.scenarios().items()}
        result.predicted |= {(index, name): run for name, run in predicted.items()}
        result.rows += rows.of(point, predicted, {}, {})
    return result


def compare(scenario: Scenario, hardware: HardwareSpec, runtime: Runtime, listener: Listener) -> ComparisonResult:
    """Predicts every cell, measures each point's engines side by side, `repeats` times, then what lossy ones cost in
    quality: who waits sees prediction beside measurement before that."""
    listener.progress(0.0, "predicting")
    result = predict_rows(scenario, hardware)
    for row in result.rows:
        listener.event("row", row.model_dump(mode="json"))

    listener.progress(0.0, f"loading {scenario.model}")
    points = points_of(scenario)
    lossy = [one for one in scenario.compared() if not one.lossless]
    measuring = _Measuring(points, scenario.repeats, runtime, hardware, listener, judged=len(lossy))
    made = _Rows(scenario, hardware)

    def rows_of(index: int, point: Point, qualities: Mapping[str, Quality | None]) -> list[Comparison]:
        names = point.scenarios()
        predicted = {name: result.predicted[index, name] for name in names}
        return made.of(point, predicted, {name: result.measured[index, name] for name in names}, qualities)

    for index, point in enumerate(points):
        asked = point.scenarios()
        runs: dict[str, list[RunResult]] = {name: [] for name in asked}
        for repeat in range(scenario.repeats):
            for name, run in measuring.once(point, repeat):
                runs[name].append(run)
        result.measured |= {(index, name): measured for name, measured in runs.items()}
        for row in rows_of(index, point, {}):
            listener.event("row", row.model_dump(mode="json"))
    qualities = _judged(scenario, lossy, runtime, listener, measuring.share)
    rows = [row for index, point in enumerate(points) for row in rows_of(index, point, qualities)]
    listener.progress(1.0, "done")
    return ComparisonResult(rows, result.predicted, result.measured, measuring.notes())


class _Rows:
    """Makes the rows of a point: the plain engine's, then one for each variant."""

    def __init__(self, scenario: Scenario, hardware: HardwareSpec) -> None:
        self.relative_error = times_for(hardware).relative_error
        self.conditions = _conditions(scenario, hardware)

    def of(
        self,
        point: Point,
        predicted: Mapping[str, RunResult],
        measured: Mapping[str, list[RunResult]],
        qualities: Mapping[str, Quality | None],
    ) -> list[Comparison]:
        error, conditions = self.relative_error, self.conditions
        plain = predicted[BASELINE]
        as_calibrated = [run for run in measured.get(BASELINE, []) if problem_of(run) != ELSEWHERE]
        rows = [baseline_row(plain, as_calibrated or measured.get(BASELINE, []), error, point.values, conditions)]
        for variant in point.variants:
            base = point.baseline_of(variant)
            both = (predicted[base], predicted[variant.name])
            pairs = comparable(zip(measured.get(base, []), measured.get(variant.name, []), strict=True))
            quality = qualities.get(variant.name)
            rows.append(variant_row(variant, both, pairs, error, point.values, conditions, quality))
        return rows


class _Measuring:
    """Measures a point's engines side by side, and those that need the machine for themselves one by one."""

    def __init__(
        self,
        points: list[Point],
        repeats: int,
        runtime: Runtime,
        hardware: HardwareSpec,
        listener: Listener,
        judged: int,
    ) -> None:
        self.runtime = runtime
        self.hardware = hardware
        self.listener = listener
        self.repeats = repeats
        self.total = repeats * sum(len(point.scenarios()) for point in points)
        self.share = self.total / (self.total + judged)  # of all work; what is judged after it takes about a cell each
        self.done = 0
        self.began_s, self.waited_s = time.perf_counter(), 0.0
        self.disturbed = Counter[str]()
        self.last: RunResult | None = None

    def once(self, point: Point, repeat: int) -> Iterator[tuple[str, RunResult]]:
        """Each engine's run, by its name."""
        asked, where = point.scenarios(), _point_text(point.values)
        beside = {name: engine for name, engine in asked.items() if self.runtime.takes_turns(engine)}
        if len(beside) > 1:
            what = f"{len(beside)} engines in turn, {where}, repeat {repeat + 1} of {self.repeats}"
            yield from zip(beside, map(self._noted, self._in_turn(list(beside.values()), what)), strict=True)
        for name in [name for name in asked if len(beside) <= 1 or name not in beside]:
            what = f"{name}, {where}, repeat {repeat + 1} (cell {self.done + 1} of {self.total})"
            yield name, self._noted(self._alone(asked[name], what))

    def _in_turn(self, engines: list[Scenario], what: str) -> list[RunResult]:
        """One of them is watched: all come equally far at the same time."""
        watched = (engines[0], self._observer(engines[0], what, len(engines)))
        others = [(engine, self._unwatched) for engine in engines[1:]]
        return self.runtime.run_in_turn([watched, *others], self.hardware, self._settle)

    def _alone(self, engine: Scenario, what: str) -> RunResult:
        self._settle()
        return self.runtime.run(engine, self.hardware, observer=self._observer(engine, what, 1))

    def _observer(self, engine: Scenario, what: str, cells: int) -> LiveObserver:
        cell = self.share / self.total
        return LiveObserver(engine, self.runtime, self.listener, what, cell * self.done, cell * cells)

    def _unwatched(self, step: Step, outcome: Outcome, end_s: float) -> None:
        self.listener.check_cancelled()

    def _settle(self) -> None:
        ran_s = time.perf_counter() - self.began_s - self.waited_s
        left_s = PATIENCE_S + WAITED_SHARE * ran_s - self.waited_s
        self.waited_s += self.runtime.settle(self.hardware, min(PATIENCE_S, max(0.0, left_s)))

    def _noted(self, run: RunResult) -> RunResult:
        if problem := problem_of(run):
            self.disturbed[problem] += 1
        self.done += 1
        self.last = run
        return run

    def notes(self) -> list[str]:
        notes = list(self.last.provenance.notes) if self.last else []
        if count := self.disturbed[STALLED]:
            notes.append(f"{count} of {self.total} cells stayed disturbed by other programs: close them")
        if count := self.disturbed[ELSEWHERE]:
            notes.append(
                f"{count} of {self.total} cells had other memory than the calibration: run `membound calibrate` again"
            )
        return notes


class LiveObserver:
    """Turns a run's steps into progress, a live point and the text of one request, twice a second."""

    def __init__(
        self,
        scenario: Scenario,
        runtime: Runtime,
        listener: Listener,
        message: str,
        done: float = 0.0,
        share: float = 1.0,
    ) -> None:
        from membound.simulator.scheduling.workload import requests_for

        loaded = runtime.model(scenario)
        requests = requests_for(scenario, vocab=loaded.spec.vocab)
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.prompts = {request.id: request.prompt_ids or () for request in requests}
        self.expected = sum(request.output_tokens for request in requests)
        self.listener = listener
        self.message = message
        self.done, self.share = done, share
        self.texts: dict[int, list[int]] = {}
        self.tokens = self.steps = 0
        self._window = (0.0, 0)
        self._next_s = 0.0

    def __call__(self, step: Step, outcome: Outcome, end_s: float) -> None:
        self.listener.check_cancelled()
        self.steps += 1
        for sequence, emitted in (outcome.emitted or {}).items():
            self.texts.setdefault(sequence, []).extend(emitted)
            self.tokens += len(emitted)
        if time.perf_counter() < self._next_s:
            return
        self._next_s = time.perf_counter() + LIVE_INTERVAL_S
        fraction = self.done + self.share * min(1.0, self.tokens / self.expected)
        self.listener.progress(fraction, self.message)
        since_s, since_tokens = self._window
        rate = (self.tokens - since_tokens) / (end_s - since_s) if end_s > since_s else 0.0
        self._window = (end_s, self.tokens)
        live = {"t": end_s, "tokens_per_s": rate, "running": len(step.work), "steps": self.steps}
        self.listener.event("live", live | {"kv_utilization": step.blocks_used / step.num_blocks})
        self._tell_text(step.work[0].sequence)

    def _tell_text(self, sequence: int) -> None:
        if self.tokenizer is None:
            return
        prompt = self.tokenizer.decode(self.prompts[sequence])
        # A character of several bytes may be half written at this step.
        text = self.tokenizer.decode(self.texts.get(sequence, [])).rstrip("\ufffd")
        self.listener.event("text", {"request": sequence, "prompt": prompt, "text": text})


def _judged(
    scenario: Scenario, lossy: Sequence[Variant], runtime: Runtime, listener: Listener, done: float
) -> dict[str, Quality | None]:
    """The price of every lossy variant by its name: up to a minute each, after the share `done` of all work."""
    from membound.runtime.quality import divergence

    plain = scenario.with_techniques(())
    qualities: dict[str, Quality | None] = {}
    for number, variant in enumerate(lossy, start=1):
        listener.check_cancelled()
        fraction = done + (1 - done) * (number - 1) / len(lossy)
        listener.progress(fraction, f"judging the quality of {variant.name} ({number} of {len(lossy)})")
        qualities[variant.name] = divergence(variant.baseline(plain), variant.scenario(plain), runtime)
    return qualities


def _conditions(scenario: Scenario, hardware: HardwareSpec) -> str:
    calibration = hardware.calibration
    machine = f"{calibration.machine}, {calibration.threads} threads" if calibration else hardware.name
    return f"{scenario.model}, {scenario.weights} weights, {machine}, {scenario.repeats} repeats"


def _point_text(point: dict[str, Any]) -> str:
    return ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in point.items()) or "as given"
