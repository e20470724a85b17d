"""Engines that take turns serve as they do alone, each by a clock that stands while others serve."""

from __future__ import annotations

import time

import pytest

from membound.kernels.dispatch import kernels_for
from membound.roofline.hardware import get_hardware
from membound.roofline.results.result import MemoryRates
from membound.roofline.scenario import Scenario, load_scenario
from membound.roofline.techniques import ContinuousBatching, NgramSpeculation
from membound.runtime.calibration.memory_watch import MemoryWatch
from membound.runtime.clock import WallClock
from membound.runtime.engine import Runtime
from membound.runtime.turns import TURNS, Serving, in_turn
from membound.simulator.scheduling.recorder import Recorder

HARDWARE = get_hardware("H100-SXM5")
TECHNIQUES = {
    "plain": (),
    "batched": (ContinuousBatching(),),
    "drafting": (ContinuousBatching(), NgramSpeculation(gamma=4)),
}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(kernels=kernels_for("cpu", batch_invariant=True))


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    small = load_scenario("live-cpu").with_value("workload.requests", 6).with_value("workload.arrivals.concurrency", 4)
    return small.with_value("workload.output_tokens", {"kind": "uniform", "low": 4, "high": 16})


def test_engines_in_turn_emit_what_they_emit_alone_by_clocks_of_their_own(runtime: Runtime, scenario: Scenario) -> None:
    asked = [scenario.with_techniques(techniques) for techniques in TECHNIQUES.values()]
    turns: list[float] = []
    start_s = time.perf_counter()
    results = runtime.run_in_turn(
        [(one, None) for one in asked], HARDWARE, before_turn=lambda: turns.append(time.perf_counter())
    )
    took_s = time.perf_counter() - start_s
    assert len(turns) == TURNS * len(asked)
    assert sum(result.summary.duration_s for result in results) < took_s
    for one, result in zip(asked, results, strict=True):
        alone = runtime.run(one, HARDWARE)
        assert result.outputs == alone.outputs
        assert result.summary.completed == 6


def test_nobody_waits_for_the_whole_run_of_another(runtime: Runtime, scenario: Scenario) -> None:
    first, second = (_serving(runtime, scenario) for _ in range(2))
    emitted: list[tuple[int, int]] = []
    in_turn([first, second], before_turn=lambda: emitted.append((first.emitted, second.emitted)))
    widest = max(abs(one - other) for one, other in emitted)
    step = scenario.workload.arrivals.concurrency  # type: ignore[union-attr]
    assert 0 < widest <= first.expected / TURNS + 2 * step
    assert first.emitted == second.emitted == first.expected


def test_a_run_says_which_share_of_its_turns_had_other_memory(runtime: Runtime, scenario: Scenario) -> None:
    class Watch(MemoryWatch):
        def __init__(self) -> None:
            self.rates = iter([35.0] * 6 + [65.0] * 6 + [36.0] * 2 * TURNS)

        def rate(self) -> float:
            return next(self.rates)

    memory = in_turn([_serving(runtime, scenario, Watch())], lambda: None)[0].provenance.memory
    assert memory == MemoryRates(before=36.0, after=36.0, calibrated=35.0, elsewhere=3 / TURNS)
    assert not memory.as_calibrated


def test_a_held_clock_stands_still() -> None:
    clock = WallClock()
    clock.hold()
    before = clock.now_s()
    time.sleep(0.02)
    assert clock.now_s() == before
    clock.go()
    assert before <= clock.now_s() < before + 0.02


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        (("engine.max_num_seqs", 2), True),
        (("engine.disaggregation", {}), False),
        (("parallel.tp", 2), False),
    ],
)
def test_engines_of_several_processes_do_not_take_turns(
    runtime: Runtime, scenario: Scenario, change: tuple[str, object], takes: bool
) -> None:
    assert runtime.takes_turns(scenario.with_value(*change)) == takes


def _serving(runtime: Runtime, scenario: Scenario, watch: MemoryWatch | None = None) -> Serving:
    clock = WallClock()
    assembly = runtime.assemble(scenario, clock, HARDWARE, Recorder())
    return Serving(assembly, clock, watch=watch, calibrated=35.0 if watch else 0.0)
