"""What does a scenario come to in virtual time?"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import simpy

from membound.roofline.cost import step_cost
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.model_files import resolve_model
from membound.roofline.models import ModelSpec
from membound.roofline.result import Provenance, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times import Times, times_for
from membound.simulator.content import Content, content_for
from membound.simulator.scheduling.build import build_scheduler, num_blocks, run_result
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.loop import Executor, serve
from membound.simulator.scheduling.recorder import Observer, Recorder
from membound.simulator.scheduling.request import Outcome, Sequence, Step
from membound.simulator.scheduling.workload import requests_for


class RooflineExecutor:
    """Takes a step's time from the roofline and its tokens from the content."""

    def __init__(self, model: ModelSpec, setup: EngineSetup, times: Times, content: Content) -> None:
        self.model = model
        self.setup = setup
        self.times = times
        self.content = content

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        shape = StepShape.of((work.start, work.tokens, 1 + len(work.drafts)) for work in step.work)
        cost = step_cost(self.model, self.setup, self.times, shape)
        emitted = {work.sequence: self.content.emitted(work, sequences[work.sequence]) for work in step.work}
        return Outcome(float(cost.time_s), emitted)


class VirtualClock:
    """SimPy's time."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env

    def now_s(self) -> float:
        return float(self.env.now)


def _engine(env: simpy.Environment, waits: Iterator[float]) -> Iterator[simpy.Event]:
    for until_s in waits:
        yield env.timeout(max(0.0, until_s - env.now))


def run(
    scenario: Scenario,
    hardware: HardwareSpec | None = None,
    observer: Observer | None = None,
    executor: Executor | None = None,
    recorder: Recorder | None = None,
) -> RunResult:
    """Serves the scenario's workload in virtual time.

    `hardware` stands in for the scenario's; `executor` replaces the roofline, for instance by recorded step times.
    Raises MemboundError where the scenario names something unknown or the model does not fit.
    """
    model = resolve_model(scenario.model)
    times = times_for(hardware or get_hardware(scenario.hardware))
    requests = requests_for(scenario)
    content_known = requests[0].output_ids is not None
    content = content_for(scenario, content_known)
    blocks = num_blocks(scenario, model, times.hardware.memory_bytes, requests)
    scheduler = build_scheduler(scenario, blocks, content_known)
    recorder = recorder or Recorder(observer)
    executor = executor or RooflineExecutor(model, scenario.setup, times, content)

    env = simpy.Environment()
    client = client_for(scenario.workload.arrivals, requests)
    env.process(_engine(env, serve(scheduler, client, executor, VirtualClock(env), recorder)))  # type: ignore[arg-type]
    env.run()
    scheduler.check_integrity()

    calibrated = times.hardware.calibration is not None
    provenance = Provenance(
        producer="simulator",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=times.hardware.name,
        notes=[
            times.hardware.source,
            f"interval ±{times.relative_error:.0%} ({'calibrated' if calibrated else 'data sheet'})",
        ],
    )
    return run_result(scenario, model, times, blocks, recorder, provenance)
