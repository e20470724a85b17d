"""A comparison joins what it predicts with what it measures, engine by engine, against the baseline of each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from membound.app.compare import compare, predict_rows
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run as simulate


class Quiet:
    def progress(self, fraction: float, message: str = "") -> None: ...

    def event(self, kind: str, payload: Any) -> None: ...

    def check_cancelled(self) -> None: ...


class SimulatedRuntime:
    """Measures what the simulator predicts; `emulated` names techniques whose time means nothing."""

    def __init__(self, emulated: str | None = None) -> None:
        self.ran: list[Scenario] = []
        self.emulated = emulated

    def model(self, scenario: Scenario) -> Any:
        return SimpleNamespace(spec=get_model(scenario.model), tokenizer=None)

    def run(self, scenario: Scenario, hardware: Any, observer: Any) -> RunResult:
        self.ran.append(scenario)
        result = simulate(scenario, hardware)
        emulated = any(one.name == self.emulated for one in scenario.techniques)
        return replace(result, provenance=result.provenance.model_copy(update={"emulated": emulated}))


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


def test_every_engine_runs_once_a_repeat_and_baselines_are_shared(scenario: Scenario) -> None:
    runtime = SimulatedRuntime()
    result = compare(scenario, get_hardware("H100-SXM5"), runtime, Quiet())  # type: ignore[arg-type]
    assert len(runtime.ran) == 2 * 5  # plain, continuous twice (a variant, and a baseline), a stack, chunks
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


def test_what_is_emulated_has_no_measured_gain(scenario: Scenario) -> None:
    lossless = scenario.model_copy(update={"variants": scenario.variants[:1]})
    runtime = SimulatedRuntime(emulated="continuous_batching")
    rows = compare(lossless, get_hardware("H100-SXM5"), runtime, Quiet()).rows  # type: ignore[arg-type]
    assert rows[1].verdict == "emulated" and rows[1].measured is None and rows[1].samples == []
