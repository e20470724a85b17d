"""How is a scenario run: in virtual time, for real, or both side by side?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from membound.app.commands.calibration import ensure_calibrated
from membound.app.commands.endpoint import EndpointOption, KeyOption, ModelOption, PatienceOption, endpoint_of
from membound.app.commands.outputs import check_output
from membound.app.commands.terminal import (
    HardwareOption,
    JsonOption,
    ScenarioArgument,
    SetOption,
    measuring,
    need_answer,
    print_result,
    scenario_of,
)
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from membound.roofline.results.result import RunResult
    from membound.simulator.scheduling.request import Outcome, Step
    from membound.simulator.timeline import PhaseLog

TimelineOption = Annotated[
    Path | None,
    typer.Option(metavar="OUT", help="write what happened when: .json for Perfetto or Chrome, .csv, .parquet"),
]
FromOption = Annotated[float | None, typer.Option("--from", metavar="S", help="seconds at which the timeline begins")]
ToOption = Annotated[float | None, typer.Option("--to", metavar="S", help="seconds at which the timeline ends")]


def simulate(
    scenario: ScenarioArgument,
    hardware: HardwareOption = None,
    timeline: TimelineOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Discrete-event run of the scenario in virtual time."""
    from membound.app import api
    from membound.app.reports import run as run_report

    log = _phase_log(timeline, from_, to)
    asked = scenario_of(scenario, set_, hardware)
    check_output("option --timeline", timeline, [scenario, asked.model_dump(mode="json")])
    result = api.simulate(asked, observer=log)
    _write_timeline(result, log, timeline, from_, to)
    answered = result.summary.completed > 0
    print_result(run_report.with_energy(result.to_json()), as_json, run_report.run, answered=answered)


def measure(
    scenario: ScenarioArgument,
    timeline: TimelineOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    endpoint: EndpointOption = None,
    endpoint_model: ModelOption = None,
    api_key_env: KeyOption = None,
    endpoint_timeout: PatienceOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Real run of the scenario on this machine, or at a server with --endpoint."""
    from membound.app.compare import LiveObserver
    from membound.app.home import membound_home
    from membound.app.keeping import keep_run
    from membound.app.machine import machine_for
    from membound.app.reports import run as run_report
    from membound.app.store import Store

    server = endpoint_of(endpoint, endpoint_model, api_key_env, endpoint_timeout)
    log = _phase_log(timeline, from_, to)
    chosen = scenario_of(scenario, set_)
    if server is not None:
        if log is not None:
            raise MemboundError("option --timeline shows steps, which a server does not; leave it out with --endpoint")
        from membound.runtime.endpoint.measure import measure as measure_at

        with measuring("membound measure") as listener:
            result = measure_at(chosen, server, listener.progress)
        # Printed first: a full disk must not cost the measurement.
        print_result(result.to_json(), as_json, run_report.run)
        keep_run(Store(membound_home()), "measure", chosen, result)
        need_answer(result.summary.completed > 0)
        return
    check_output("option --timeline", timeline, [scenario, chosen.model_dump(mode="json")])
    ensure_calibrated(chosen)
    with measuring("membound measure") as listener:
        hardware, runtime = machine_for(chosen)
        live = LiveObserver(chosen, runtime, listener, f"measuring {chosen.name}")

        def observer(step: Step, outcome: Outcome, end_s: float) -> None:
            live(step, outcome, end_s)
            if log is not None:
                log(step, outcome, end_s)

        result = runtime.run(chosen, hardware, observer=observer)
    print_result(result.to_json(), as_json, run_report.run)
    keep_run(Store(membound_home()), "measure", chosen, result)
    _write_timeline(result, log, timeline, from_, to)
    need_answer(result.summary.completed > 0)


def compare(
    scenario: ScenarioArgument,
    endpoint: EndpointOption = None,
    endpoint_model: ModelOption = None,
    api_key_env: KeyOption = None,
    endpoint_timeout: PatienceOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prediction and measurement side by side, with the error of each; measured at a server with --endpoint."""
    from membound.app.compare import compare as run_compare
    from membound.app.home import membound_home
    from membound.app.keeping import keep_comparison
    from membound.app.machine import machine_for
    from membound.app.reports import comparison as report
    from membound.app.store import Store

    server = endpoint_of(endpoint, endpoint_model, api_key_env, endpoint_timeout)
    chosen = scenario_of(scenario, set_)
    if server is not None:
        from membound.app import endpoint_comparison

        with measuring("membound compare") as listener:
            at_server = endpoint_comparison.compare(chosen, server, listener)
        print_result(at_server.to_json(), as_json, endpoint_comparison.comparison)
        keep_comparison(Store(membound_home()), chosen, at_server)
        return
    ensure_calibrated(chosen)
    with measuring("membound compare") as listener:
        hardware, runtime = machine_for(chosen)
        result = run_compare(chosen, hardware, runtime, listener)
    print_result(result.to_json(), as_json, report.comparison)
    keep_comparison(Store(membound_home()), chosen, result)


def _phase_log(timeline: Path | None, from_s: float | None, to_s: float | None) -> PhaseLog | None:
    """What listens to a run whose timeline is asked for; the options are checked before the run."""
    if timeline is None:
        if from_s is not None or to_s is not None:
            raise MemboundError("options --from and --to cut a timeline; give --timeline OUT too, or leave them out")
        return None
    from membound.simulator.timeline import PhaseLog, checked_suffix, checked_window

    checked_suffix(timeline)
    checked_window(from_s, to_s)
    return PhaseLog()


def _write_timeline(
    result: RunResult, log: PhaseLog | None, path: Path | None, from_s: float | None, to_s: float | None
) -> None:
    if path is None:
        return
    from membound.simulator.timeline import Timeline

    timeline = Timeline.of(result, log, from_s, to_s)
    timeline.write(path)
    for note in (*timeline.notes, f"timeline written to {path}"):
        typer.echo(note, err=True)
