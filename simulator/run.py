"""How is a scenario simulated in virtual time?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models import ModelSpec
from membound.roofline.models.files import resolve_model
from membound.roofline.results.result import Column, Provenance, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import TextPrompts, TraceArrivals, Workload
from membound.roofline.shape import StepShape
from membound.roofline.speculation.steps import checked_speculation, with_counted_alpha
from membound.roofline.techniques import EngineSetup, NgramDrafts
from membound.roofline.times.certainty import Certainty
from membound.roofline.times.known import times_for
from membound.roofline.times.operator import Times
from membound.simulator.content import Content, content_for
from membound.simulator.executor import RooflineExecutor
from membound.simulator.lockstep import Lockstep, Watch, is_ordinary
from membound.simulator.scheduling.build import bounds_of, build_scheduler, run_result
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.kv_memory import KvMemory, kv_memory
from membound.simulator.scheduling.loop import Executor, Waits, serve
from membound.simulator.scheduling.recorder import Observer, Recorder
from membound.simulator.scheduling.request import Outcome, Request, Sequence, Step
from membound.simulator.scheduling.workload import longest_request, request_columns, request_stream
from membound.simulator.scheduling.workload.traces import expected_rows
from membound.simulator.step_times import StepTimes

# Requests whose records take some 5 GiB; a trace of 10 GB has many more.
MOST_RECORDED = 10_000_000


class OwnClock:
    """The time of an engine that is alone, so that nothing happens while it sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep_through(self, waits: Waits) -> None:
        """Lets each step pass at once, or run of equal steps."""
        for until_s in waits:
            self._now_s = max(self._now_s, until_s)


@dataclass(frozen=True)
class DeployedScenario:
    """A scenario with its model, device times and memory looked up: what each of its engines is built of."""

    scenario: Scenario
    model: ModelSpec
    times: Times
    memory: KvMemory
    step_times: StepTimes
    content: Content
    content_known: bool

    def executor(self, step_by_step: bool = False) -> RooflineExecutor:
        link = self.times.hardware.host
        return RooflineExecutor(self.step_times, self.content, self.memory, link, step_by_step)


def check_recordable(workload: Workload) -> None:
    """Raises MemboundError where a trace has more requests than a run keeps records of."""
    trace = workload.arrivals
    if not isinstance(trace, TraceArrivals) or workload.requests is not None or trace.duration_s is not None:
        return
    if (rows := expected_rows(trace)) > MOST_RECORDED:
        raise MemboundError(
            f"trace '{trace.file}' has about {rows:,.0f} rows, and a run keeps records of {MOST_RECORDED:,} requests "
            "at most; give workload.requests, or a window by workload.arrivals.start_s and duration_s"
        )


def deploy(scenario: Scenario, hardware: HardwareSpec | None = None) -> tuple[DeployedScenario, Iterator[Request]]:
    """What the scenario's engine is made of, and its requests; `hardware` stands in for the scenario's."""
    check_recordable(scenario.workload)
    model = resolve_model(scenario.model)
    checked_speculation(scenario, model)
    scenario = with_counted_alpha(scenario, model)
    times = times_for(hardware or get_hardware(scenario.hardware), scenario.setup.profile)
    requests = request_stream(scenario.workload)
    drafts = scenario.setup.drafts
    content_known = isinstance(scenario.workload.prompts, TextPrompts)
    longest = None
    if content_known:  # few enough to look at all of them before
        listed = list(requests)
        longest = max(turn.tokens for request in listed for turn in request.turns())
        content_known = drafts is None or isinstance(drafts, NgramDrafts)
        requests = iter(listed if content_known else [_without_content(request) for request in listed])
    reach = None
    if longest is None and any(window for _, window in Footprint.of(model, scenario.setup).cache.per_token):
        reach = longest_request(scenario.workload, model.max_context)
    memory = kv_memory(scenario, model, times.hardware.memory_bytes, longest, reach)
    step_times = StepTimes(model, scenario.setup, times, memory.seats, scenario.step_tokens)
    content = content_for(scenario, content_known)
    return DeployedScenario(scenario, model, times, memory, step_times, content, content_known), requests


def run(
    scenario: Scenario,
    hardware: HardwareSpec | None = None,
    observer: Observer | None = None,
    executor: Executor | None = None,
    recorder: Recorder | None = None,
    step_by_step: bool = False,
    watch: Watch | None = None,
    enough: Callable[[Sequence], bool] | None = None,
) -> RunResult:
    """Serves the scenario's workload in virtual time.

    `hardware` replaces the scenario's; `executor` replaces the roofline, for instance by recorded step times.
    `observer` sees every step; `watch` is told the virtual time now and then, and may raise to end the run. Equal steps
    run as one event, unless `step_by_step`. If nobody looks at single steps, an ordinary engine is simulated by
    `Lockstep`, which is faster and gives the same records. With disaggregated prefill, `enough` is told each request
    that ends, and may end the run, with what was recorded until then. Raises MemboundError if the scenario names
    something unknown or the model does not fit.
    """
    looking = observer if watch is None else _with_watch(observer, watch)
    if scenario.cluster is not None:
        from membound.simulator.cluster.run import run_cluster

        assert executor is None and recorder is None, "the replicas of a cluster have their own"
        return run_cluster(scenario, hardware, looking, step_by_step)
    deployment, requests = deploy(scenario, hardware)
    if scenario.engine.disaggregation is not None:
        from membound.simulator.disaggregated import run_disaggregated

        return run_disaggregated(deployment, requests, looking, step_by_step, enough)
    model, times, memory = deployment.model, deployment.times, deployment.memory
    scheduler = build_scheduler(deployment.scenario, model, times, memory, deployment.content_known)
    nobody_looks = observer is None and executor is None and recorder is None and not step_by_step
    ordinary = nobody_looks and is_ordinary(scheduler, scenario.workload)
    recorder = recorder or Recorder(None if ordinary else looking)
    recorder.bounds = recorder.bounds or bounds_of(model, scenario.setup, times)
    if ordinary:
        Lockstep(scheduler, deployment.step_times, request_columns(scenario.workload), recorder, watch).serve()
    else:
        executor = executor or deployment.executor(step_by_step)
        client, clock = client_for(scenario.workload.arrivals, requests), OwnClock()
        clock.sleep_through(serve(scheduler, client, executor, clock, recorder))
        scheduler.check_integrity()
    return run_result(scenario, model, times, memory.num_blocks, recorder, provenance(deployment, recorder.steps()))


def _with_watch(observer: Observer | None, watch: Watch) -> Observer:
    def observed(step: Step, outcome: Outcome, end_s: float) -> None:
        if observer is not None:
            observer(step, outcome, end_s)
        watch(end_s)

    return observed


def provenance(deployment: DeployedScenario, steps: Mapping[str, Column]) -> Provenance:
    """Who made the numbers of a simulated run, and how far off the steps may be that it was made of."""
    hardware = deployment.times.hardware
    notes = [f"data sheet of {hardware.name}: {hardware.source}"]
    if len(steps["time_s"]):
        notes.append(certainty_of(deployment.model, deployment.scenario.setup, deployment.times, steps).said)
    return Provenance(
        producer="simulator",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=hardware.name,
        notes=notes,
    )


def certainty_of(model: ModelSpec, setup: EngineSetup, times: Times, steps: Mapping[str, Column]) -> Certainty:
    """How far off a run's steps may be: the mean of those without prompts by their time, or where each has prompts
    of all."""
    time_s = steps["time_s"] * (steps["prefill_sequences"] == 0)
    time_s = time_s if time_s.any() else steps["time_s"]
    shape = StepShape.of_columns(steps).mapped(lambda column: float(np.average(column, weights=time_s)))
    return Certainty.of(model, setup, times, shape)


def _without_content(request: Request) -> Request:
    """Only n-gram drafts follow from the text; what other drafters propose is modelled."""
    return replace(request, prompt_ids=None, output_ids=None)
