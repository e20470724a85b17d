"""The commands that decide: what stacks, what to do next, what to deploy, what a range comes to, of what to choose."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from membound.app.commands.outputs import check_output, check_suffix, write_rows
from membound.app.commands.terminal import (
    HardwareOption,
    JsonOption,
    ScenarioArgument,
    SetOption,
    print_result,
    progress,
    scenario_of,
)
from membound.roofline.errors import MemboundError
from membound.roofline.part import MAX_TOKENS
from membound.roofline.reading.nearest import did_you_mean

if TYPE_CHECKING:
    from membound.roofline.techniques import GainMetric
    from membound.simulator.sweeping.sweep import Swept
    from membound.simulator.workers import Workers

MetricOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="what a gain is of: tpot_s or output_tokens_per_s")
]
SimulateOption = Annotated[
    bool, typer.Option("--simulate", help="by a discrete-event run of each engine, not by closed forms")
]
JobsOption = Annotated[int | None, typer.Option(help="processes; all cores if not given")]
BackendOption = Annotated[
    str, typer.Option(help="who computes: loky (processes), threading, sequential, ray or dask (if installed)")
]
PRECISIONS, CONFIRMED = "given,8bit,4bit", 3
AddressOption = Annotated[str | None, typer.Option(help="of a running Ray or Dask cluster; else one is started here")]


def stack(
    scenario: ScenarioArgument,
    batch: Annotated[str | None, typer.Option(metavar="1,8,64", help="sequences under way, one stack for each")] = None,
    context: Annotated[
        str | None, typer.Option(metavar="512,8192", help="tokens that a decode step attends to, one stack for each")
    ] = None,
    techniques: Annotated[
        str | None,
        typer.Option(
            metavar="A,B:int4", help="what to stack instead of the scenario's techniques, A, or B in a format"
        ),
    ] = None,
    metric: MetricOption = None,
    simulate: SimulateOption = False,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    jobs: JobsOption = None,
    backend: BackendOption = "loky",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Techniques alone, one on top of the other and together: the product of gains against the real gain."""
    from membound.app.reports import stacks as report
    from membound.simulator.stacking.asked import chosen_techniques
    from membound.simulator.stacking.document import to_json
    from membound.simulator.stacking.stacking import stack as run_stack

    _closed_forms_run_here(simulate, jobs, backend, address)
    chosen = scenario_of(scenario, set_, hardware)
    names = None if techniques is None else _names(techniques, "--techniques")
    with progress() as listener:
        stacks = run_stack(
            chosen,
            techniques=names,
            batches=_counts(batch, "--batch"),
            contexts=_counts(context, "--context"),
            metric=_metric(metric),
            simulate=simulate,
            workers=_workers(backend, jobs, address),
            progress=listener.progress,
        )
    document = {"scenario": chosen.model_dump(mode="json"), **to_json(stacks, chosen_techniques(chosen, names))}
    answered = any(one["reason"] is None for one in document["stacks"])
    print_result(document, as_json, report.stacks, answered=answered)


def advise(
    scenario: ScenarioArgument,
    batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=MAX_TOKENS, help="sequences under way instead")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, max=MAX_TOKENS, help="tokens attended to in a decode step, instead"),
    ] = None,
    metric: MetricOption = None,
    simulate: SimulateOption = False,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    jobs: JobsOption = None,
    backend: BackendOption = "loky",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Which technique should come next at this operating point, why, and at what price in quality."""
    from membound.app.reports import advice as report
    from membound.simulator.advice.advisor import advise as run_advise
    from membound.simulator.advice.advisor import to_json

    _closed_forms_run_here(simulate, jobs, backend, address)
    chosen = scenario_of(scenario, set_, hardware)
    with progress() as listener:
        advice = run_advise(
            chosen,
            batch=batch,
            context=context,
            metric=_metric(metric),
            simulate=simulate,
            workers=_workers(backend, jobs, address),
            progress=listener.progress,
        )
    print_result(to_json(advice), as_json, report.advice)


def plan(
    scenario: ScenarioArgument,
    devices: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="of the catalog; else those of the scenario's sweep, else all accelerators"),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="A,B", help="given (as the scenario says), 8bit, 4bit; the first is the answer's")
    ] = PRECISIONS,
    objective: Annotated[str, typer.Option(help="cost, or devices: the fewest")] = "cost",
    confirm: Annotated[
        int,
        typer.Option(min=0, max=50, help="how many the simulator confirms; 0: closed forms alone, in seconds"),
    ] = CONFIRMED,
    disaggregate: Annotated[
        bool, typer.Option(help="also with prompts and outputs on engines of their own, where something is confirmed")
    ] = True,
    most_rate: Annotated[
        bool, typer.Option("--max-rate", help="instead: the most that the scenario's own deployment serves in time")
    ] = False,
    set_: SetOption = None,
    jobs: JobsOption = None,
    backend: BackendOption = "loky",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """The cheapest or smallest deployment that meets the objective, and the front of speed against throughput.

    Of devices that are named the best of each, with prompts and outputs together and apart. `--confirm 0` answers in
    seconds, by closed forms; where it is interrupted, what is known until then is printed.
    """
    from membound.app.reports import plan as report
    from membound.simulator.planning.demand import Objective
    from membound.simulator.planning.document import to_json
    from membound.simulator.planning.most import max_rate
    from membound.simulator.planning.planner import Options, Plan, plan_by_stages

    chosen = scenario_of(scenario, set_)
    aims: tuple[Objective, ...] = get_args(Objective)
    aim = next((aim for aim in aims if aim == objective), None)
    if aim is None:
        raise MemboundError(f"option --objective is '{objective}'; give {' or '.join(aims)}")
    if most_rate:
        _only_of_the_scenario(
            {
                "--devices": devices,
                "--precision": None if precision == PRECISIONS else precision,
                "--objective": None if objective == "cost" else objective,
                "--confirm": None if confirm == CONFIRMED else confirm,
            }
        )
        with progress() as listener:
            rate, summary = max_rate(chosen, progress=listener.progress)
        document = {"max_rate_rps": rate, "summary": summary.model_dump(mode="json"), "scenario": chosen.name}
        print_result(document, as_json, report.max_rate)
        return
    named = None if devices is None else _names(devices, "--devices")
    options = Options(tuple(_names(precision, "--precision")), aim, confirm, disaggregate)
    workers = None if jobs is None and backend == "loky" else _workers(backend, jobs, address)
    found: Plan | None = None
    try:
        with progress() as listener:
            for found in plan_by_stages(chosen, named, options, workers, listener.progress):  # noqa: B007
                pass
    except (KeyboardInterrupt, SystemExit):  # who stops it has what is known until then
        if found is not None:
            print_result(to_json(found), as_json, report.plan)
        raise
    assert found is not None, "a plan has a stage"
    print_result(to_json(found), as_json, report.plan)


def sweep(
    scenario: ScenarioArgument,
    over: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B,C", help="a field and its values, or batch or context; several give their product"
        ),
    ],
    closed_form: Annotated[
        bool, typer.Option("--closed-form", help="means of a steady load by closed forms, not a discrete-event run")
    ] = False,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    jobs: JobsOption = None,
    backend: BackendOption = "loky",
    address: AddressOption = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="OUT", help="write every point to this file: .csv or .parquet")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The scenario at every point of a product of values, on all cores or on a cluster.

    Points that cannot be served are rows that say why; exit code 2 where none can, or a value is none of its field's.
    """
    from membound.app.reports import sweep as report
    from membound.simulator.sweeping.sweep import parse_axis, to_json
    from membound.simulator.sweeping.sweep import sweep as run_sweep

    chosen = scenario_of(scenario, set_, hardware)
    check_suffix("option --csv", table, ".csv", ".parquet")
    check_output("option --csv", table, [scenario, chosen.model_dump(mode="json")])
    axes = [parse_axis(text) for text in over]
    points: list[Swept] = []
    try:
        with progress() as listener:
            run_sweep(
                chosen,
                axes,
                simulate=not closed_form,
                workers=_workers(backend, jobs, address),
                progress=listener.progress,
                found=points,
            )
    except (KeyboardInterrupt, SystemExit):  # who stops it has the points until then
        if points:
            if table is not None:
                _write_points(table, points)
            print_result(to_json(chosen, points, not closed_form), as_json, report.sweep)
        raise
    if table is not None:
        _write_points(table, points)
    if all(point.summary is None for point in points):
        raise MemboundError(f"no point of the sweep can be served; of the first, {points[0].reason}")
    print_result(to_json(chosen, points, not closed_form), as_json, report.sweep)


def catalog(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="techniques, profiles, devices or models")],
    as_json: JsonOption = False,
) -> None:
    """List what a scenario can name: techniques with their parameters, engine profiles, devices, models."""
    from membound.app.commands import catalog as catalogs

    chosen = next((known for known in catalogs.KINDS if known == kind), None)
    if chosen is None:
        close = did_you_mean(kind, catalogs.KINDS)
        raise MemboundError(f"catalog '{kind}' is unknown{close}; there are {', '.join(catalogs.KINDS)}")
    print_result(catalogs.listing(chosen), as_json, catalogs.render)


def add_commands(app: typer.Typer) -> None:
    """Registers the commands of this module."""
    for command in (stack, advise, plan, sweep, catalog):
        app.command()(command)


def _names(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise MemboundError(f"option {option} is '{text}'; give names with commas between them")
    if twice := [name for name in names if names.count(name) > 1]:
        raise MemboundError(f"option {option} names {twice[0]} twice; give each once")
    return names


def _counts(text: str | None, option: str) -> list[int]:
    if text is None:
        return []
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > MAX_TOKENS:
        raise MemboundError(
            f"option {option} is {reprlib.repr(text)}; give whole numbers from 1 to {MAX_TOKENS:,}, such as 1,8,64"
        )
    if twice := [count for count in counts if counts.count(count) > 1]:
        raise MemboundError(f"option {option} gives {twice[0]} twice; give each number once")
    return counts


def _metric(name: str | None) -> GainMetric | None:
    from membound.roofline.techniques import GainMetric

    known: tuple[GainMetric, ...] = get_args(GainMetric)
    if name is None:
        return None
    for metric in known:
        if metric == name:
            return metric
    raise MemboundError(f"option --metric is '{name}'; give {' or '.join(known)}")


def _workers(backend: str, jobs: int | None, address: str | None) -> Workers:
    from membound.simulator.workers import BACKENDS, Workers

    for known in BACKENDS:
        if known == backend:
            return Workers(known, jobs, address)
    raise MemboundError(f"option --backend is '{backend}'; give {', '.join(BACKENDS)}")


def _closed_forms_run_here(simulate: bool, jobs: int | None, backend: str, address: str | None) -> None:
    """Refuses what says how many runs are spread where there is a single closed form."""
    given = {"--jobs": jobs, "--backend": None if backend == "loky" else backend, "--address": address}
    for name, value in given.items():
        if value is not None and not simulate:
            raise MemboundError(
                f"option {name} is '{value}', but closed forms run here, in milliseconds; leave it out, or add "
                "--simulate"
            )


def _only_of_the_scenario(given: dict[str, Any]) -> None:
    """Refuses what looks for other deployments where the scenario's own is asked about."""
    for name, value in given.items():
        if value is not None:
            raise MemboundError(
                f"option {name} is '{value}', but --max-rate is of the scenario's own deployment; leave one of them out"
            )


def _write_points(path: Path, points: Sequence[Swept]) -> None:
    """One row a point: its values, the columns of its summary, and the reason where there is none."""
    rows = [point.row for point in points]
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "reason"))
    write_rows(path, [*columns, "reason"], rows)
