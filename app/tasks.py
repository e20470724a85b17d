"""What do the jobs of each kind do? Each task runs in a worker process and returns what the page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from membound.app.compare import ComparisonResult, LiveObserver, compare
from membound.app.keeping import keep_comparison, keep_run
from membound.app.machine import calibrate_machine, machine_for
from membound.app.room import make_room
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.scenario import Scenario, scenario_of_text

if TYPE_CHECKING:
    from membound.app.worker import JobContext
    from membound.runtime.engine import Runtime


@dataclass(frozen=True)
class _Watched:
    """Tells a job how far its work is, and ends the work where the job was cancelled."""

    context: JobContext

    def progress(self, fraction: float, message: str = "") -> None:
        self.context.check_cancelled()
        self.context.progress(fraction, message)

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        self.context.event(kind, payload)

    def check_cancelled(self) -> None:
        self.context.check_cancelled()


def run_calibrate(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Measures this machine's roofs and keeps them; the old calibration stays where that fails."""
    calibration = calibrate_machine(
        spec.get("device", "cpu"),
        spec.get("threads"),
        quick=bool(spec.get("quick")),
        progress=_Watched(context).progress,
    )
    return {"created": calibration.created, "machine": calibration.machine}


def run_compare(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Predicts and measures the scenario's cells and keeps them as one run."""
    scenario = scenario_of(spec)
    if "endpoint" in spec:
        from membound.app import endpoint_comparison, served

        result: ComparisonResult = endpoint_comparison.compare(
            scenario, served.endpoint_of(spec["endpoint"]), _Watched(context)
        )
    else:
        hardware, runtime = machine_for(scenario)
        result = compare(scenario, hardware, runtime, context)
    run_id = keep_comparison(context.store, scenario, result, context.job_id)
    return {"run_id": run_id, **result.to_json()}


def run_measure(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Runs the scenario for real and keeps the run."""
    scenario = scenario_of(spec)
    if "endpoint" in spec:
        from membound.app import served
        from membound.runtime.endpoint.measure import measure, need_answers

        watched = _Watched(context)
        result = measure(scenario, served.endpoint_of(spec["endpoint"]), watched.progress, watched.event)
        need_answers(result)
    else:
        hardware, runtime = machine_for(scenario)
        observer = LiveObserver(scenario, runtime, context, f"measuring {scenario.name}")
        result = runtime.run(scenario, hardware, observer=observer)
    return {"run_id": keep_run(context.store, "measure", scenario, result, context.job_id), **result.to_json()}


def run_simulate(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Simulates the scenario and keeps the run."""
    from membound.simulator.run import run

    scenario = scenario_of(spec)
    context.progress(0.0, f"simulating {scenario.name}")
    result = run(scenario, watch=lambda now_s: context.check_cancelled())
    return {"run_id": keep_run(context.store, "simulate", scenario, result, context.job_id), **result.to_json()}


def run_policies(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Simulates the scenario as it is given and under each other policy of the spec, and keeps all as one run."""
    from membound.app import uploads
    from membound.app.serving import serve

    scenario = scenario_of(spec)
    try:
        document, tables = serve(scenario, spec.get("policies", []), context)
    except MemboundError as error:
        raise uploads.renamed(error) from None
    return {"run_id": _keep_asked(spec, context, scenario.name, document, tables)}


def run_max_rate(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Finds the most that the scenario's own deployment serves within its objective, and keeps it as a run."""
    from membound.app import uploads
    from membound.simulator.planning.most import max_rate

    scenario = scenario_of(spec)

    try:
        rate_rps, summary = max_rate(scenario, progress=_Watched(context).progress)
    except MemboundError as error:
        raise uploads.renamed(error) from None
    document = {"max_rate_rps": rate_rps, "summary": summary.model_dump(mode="json")}
    return {"run_id": _keep_asked(spec, context, scenario.name, document, {})}


def run_plan(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Plans the scenario on each device of the spec and keeps the answers as one run."""
    from membound.app.deployments import plan_each

    scenario = scenario_of(spec)

    document = plan_each(
        scenario,
        spec["devices"],
        spec["precisions"],
        spec["objective"],
        spec["disaggregate"],
        _Watched(context).progress,
    )
    return {"run_id": _keep_asked(spec, context, scenario.name, document, {})}


def run_stack(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Costs every subset of the spec's techniques on the scenario's engine and keeps the analysis as one run."""
    from membound.app.stacks import parse_techniques, stack_document

    document = stack_document(
        scenario_of(spec),
        parse_techniques(spec["techniques"]),
        batch=spec["batch"],
        context=spec["context"],
        metric=spec["metric"],
        simulate=spec["simulate"],
        progress=_Watched(context).progress,
    )
    return {"run_id": _keep_asked(spec, context, "stack", document, {})}


def run_experiment(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Runs an experiment and keeps what it found as one run."""
    from membound.app.experiments import run
    from membound.app.experiments.finding import Ask

    name = spec["name"]
    hardware, runtime = machine_of(name)
    finding = run(name, Ask(context, hardware, runtime, spec["quick"]))
    return {"run_id": _keep_asked(spec, context, name, finding.to_json(), {})}


def machine_of(experiment: str) -> tuple[HardwareSpec, Runtime | None]:
    """The device that an experiment predicts for, or this machine and a runtime on it where it measures."""
    from membound.app.experiments import MEASURED_BY, PREDICTED, PREDICTED_FOR
    from membound.roofline.hardware import get_hardware
    from membound.roofline.scenario import load_scenario

    if experiment in PREDICTED:
        return get_hardware(PREDICTED_FOR), None
    return machine_for(load_scenario(MEASURED_BY))


def run_validate(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Predicts every row of an uploaded table and keeps the errors as one run."""
    from membound.app import uploads
    from membound.app.validation import document, rows_table
    from membound.roofline.validation.report import validate_table

    path = uploads.find(context.store, spec["table"])
    context.progress(0.1, path.name)
    try:
        report = validate_table(path)
    except MemboundError as error:
        raise uploads.renamed(error) from None
    tables = {"rows": rows_table(report)}
    return {"run_id": _keep_asked(spec, context, spec["table"], document(report), tables)}


def _keep_asked(
    spec: dict[str, Any], context: JobContext, label: str, document: dict[str, Any], tables: dict[str, Any]
) -> str:
    """Keeps what a page asked for under the digest by which it asks again, and makes room for it."""
    run_id = context.store.save_run(
        kind=context.store.job(context.job_id).kind,
        label=label,
        digest=spec["digest"],
        scenario_yaml=spec.get("scenario", ""),
        summary={},
        tables=tables,
        comparison=document,
        job_id=context.job_id,
    )
    make_room(context.store)
    return run_id


def scenario_of(spec: dict[str, Any]) -> Scenario:
    """The scenario of a job's spec, which holds it as YAML text."""
    text = spec.get("scenario")
    if not isinstance(text, str):
        raise MemboundError("the job has no field 'scenario' with a scenario's YAML text")
    return scenario_of_text(text)
