"""A comparison joins what it predicts with what it measures, engine by engine, against the baseline of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from membound.app.compare import PATIENCE_S, compare, predict_rows
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.results.comparison import Quality
from membound.roofline.results.result import MemoryRates, RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run as simulate


class Quiet:
    def progress(self, fraction: float, message: str = "") -> None: ...

    def event(self, kind: str, payload: Any) -> None: ...

    def check_cancelled(self) -> None: ...


class SimulatedRuntime:
    """Measures what the simulator predicts; `emulated` names techniques whose time means nothing.

    `memory` has GB/s that memory gives before and after each run, of 35 when it was calibrated; runs elsewhere take
    half as long. Engines run side by side unless `alone`. Whoever waits for memory waits `waits_s`, if he may.
    """

    def __init__(
        self,
        emulated: str | None = None,
        memory: Iterable[tuple[float, float]] = (),
        alone: bool = False,
        waits_s: float = 0.0,
    ) -> None:
        self.ran: list[Scenario] = []
        self.beside: list[int] = []
        self.emulated = emulated
        self.memory = iter(memory)
        self.alone = alone
        self.waits_s = waits_s
        self.settled: list[float] = []

    def settle(self, hardware: Any, patience_s: float) -> float:
        self.settled.append(patience_s)
        return min(self.waits_s, patience_s)

    def takes_turns(self, scenario: Scenario) -> bool:
        return not self.alone

    def run_in_turn(self, asked: Any, hardware: Any, before_turn: Any) -> list[RunResult]:
        self.beside.append(len(asked))
        before_turn()
        return [self.run(scenario, hardware, observer) for scenario, observer in asked]

    def model(self, scenario: Scenario) -> Any:
        return SimpleNamespace(spec=get_model(scenario.model), tokenizer=None)

    def run(self, scenario: Scenario, hardware: Any, observer: Any) -> RunResult:
        self.ran.append(scenario)
        result = simulate(scenario, hardware)
        emulated = any(one.name == self.emulated for one in scenario.techniques)
        update: dict[str, Any] = {"emulated": emulated}
        if rates := next(self.memory, None):
            update["memory"] = memory = MemoryRates(before=rates[0], after=rates[1], calibrated=35.0)
            if not memory.as_calibrated:
                tpot = result.summary.tpot_s.model_copy(update={"mean": (result.summary.tpot_s.mean or 0.0) / 2})
                result = replace(result, summary=result.summary.model_copy(update={"tpot_s": tpot}))
        return replace(result, provenance=result.provenance.model_copy(update=update))


@pytest.fixture
def scenario() -> Scenario:
    return parse_scenario(
        {
            "name": "small",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 4},
                "requests": 6,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 64}},
                "output_tokens": {"kind": "uniform", "low": 8, "high": 24},
            },
            "repeats": 2,
            "variants": [
                "continuous_batching",
                ["continuous_batching", "w8a8"],
                {"name": "chunks", "beside": ["continuous_batching"], "set": {"engine.batching": "chunked_prefill"}},
            ],
        }
    )


@pytest.mark.parametrize("alone", [False, True], ids=["side by side", "one by one"])
def test_every_engine_runs_once_a_repeat_and_baselines_are_shared(scenario: Scenario, alone: bool) -> None:
    runtime = SimulatedRuntime(alone=alone)
    result = compare(scenario, get_hardware("H100-SXM5"), runtime, Quiet())  # type: ignore[arg-type]
    assert len(runtime.ran) == 2 * 5  # plain, continuous twice (a variant, and a baseline), a stack, chunks
    assert runtime.beside == ([] if alone else [5, 5])
    assert [row.technique for row in result.rows] == ["baseline", *(one.name for one in scenario.compared())]
    for row in result.rows:
        assert row.error == pytest.approx(0.0) and row.spread == pytest.approx(0.0)
    assert result.rows[-1].baseline == "continuous batching" and result.rows[2].baseline == "plain engine"


def test_rows_before_a_measurement_are_those_after_it_less_what_was_measured(scenario: Scenario) -> None:
    hardware = get_hardware("H100-SXM5")
    before = predict_rows(scenario, hardware).rows
    after = compare(scenario, hardware, SimulatedRuntime(), Quiet()).rows  # type: ignore[arg-type]
    assert [row.predicted for row in before] == [row.predicted for row in after]
    assert {row.verdict for row in before} == {"not measured"}


def test_prediction_stands_beside_measurement_before_quality_is_judged(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Quality(kl_nats=0.1, top1_agreement=0.9, tokens=100, against="bf16")
    monkeypatch.setattr("membound.runtime.quality.divergence", lambda *asked: judged)
    told: list[Any] = []
    fractions: list[float] = []

    class Heard(Quiet):
        def progress(self, fraction: float, message: str = "") -> None:
            fractions.append(fraction)
            told.append(message)

        def event(self, kind: str, payload: Any) -> None:
            told.append(payload)

    result = compare(scenario, get_hardware("H100-SXM5"), SimulatedRuntime(), Heard())  # type: ignore[arg-type]
    before = told[: next(at for at, one in enumerate(told) if str(one).startswith("judging"))]
    measured = {one["technique"] for one in before if isinstance(one, dict) and one.get("measured") is not None}
    assert measured == {row.technique for row in result.rows}
    assert [row.quality for row in result.rows if not row.lossless] == [judged] and fractions == sorted(fractions)


def test_what_is_emulated_has_no_measured_gain(scenario: Scenario) -> None:
    lossless = scenario.model_copy(update={"variants": scenario.variants[:1]})
    runtime = SimulatedRuntime(emulated="continuous_batching")
    rows = compare(lossless, get_hardware("H100-SXM5"), runtime, Quiet()).rows  # type: ignore[arg-type]
    assert rows[1].verdict == "emulated" and rows[1].measured is None and rows[1].samples == []


def test_runs_while_memory_was_in_another_state_do_not_count(scenario: Scenario) -> None:
    one = parse_scenario(scenario.model_dump(mode="json") | {"variants": ["w8a8"], "repeats": 3})
    calm, changed = (35.0, 34.0), (36.0, 64.0)
    runtime = SimulatedRuntime(memory=[calm, calm, calm, changed, calm, calm])  # plain and w8a8, three times
    result = compare(one, get_hardware("H100-SXM5"), runtime, Quiet())  # type: ignore[arg-type]
    assert len(runtime.ran) == 6 and len(result.rows[1].samples) == 2
    assert [row.error for row in result.rows] == pytest.approx([0.0, 0.0])
    assert "1 of 6 cells had other memory than the calibration: run `membound calibrate` again" in result.notes


def test_gains_of_equal_memory_count_where_it_is_always_another(scenario: Scenario) -> None:
    runtime = SimulatedRuntime(memory=itertools.repeat((65.0, 64.0)))
    result = compare(scenario, get_hardware("H100-SXM5"), runtime, Quiet())  # type: ignore[arg-type]
    assert all(row.error == pytest.approx(0.0) for row in result.rows[1:] if row.metric == "tpot_s")


def test_memory_that_changed_for_good_is_not_waited_for_in_vain(scenario: Scenario) -> None:
    runtime = SimulatedRuntime(alone=True, waits_s=PATIENCE_S)
    compare(scenario, get_hardware("H100-SXM5"), runtime, Quiet())  # type: ignore[arg-type]
    first, *later = runtime.settled
    assert first == PATIENCE_S and max(later) < 1.0  # simulated runs took no time of which a share could be waited
