"""How does a result of another tool get into the history, and beside what is predicted for it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from membound.app.terminal import JsonOption, SetOption, print_result, scenario_of
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from membound.roofline.result import RunResult

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="of vllm bench serve, GuideLLM or AIPerf: JSON, or JSON lines")
]


def import_results(
    file: FileArgument,
    scenario: Annotated[str | None, typer.Option(metavar="SCENARIO", help="what was asked, where you know it")] = None,
    model: Annotated[str | None, typer.Option(help="the model, as the catalog calls it")] = None,
    hardware: Annotated[str | None, typer.Option(help="the device that served it: predicts the run, too")] = None,
    profile: Annotated[str | None, typer.Option(help="the engine that served it; vllm if not given")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep what another benchmark tool measured as a run; with hardware or a scenario, beside its prediction."""
    from membound.app.home import membound_home
    from membound.app.keeping import keep_comparison, keep_run
    from membound.app.store import Store
    from membound.runtime.endpoint.foreign import read_results

    for option, value in {"--model": model, "--hardware": hardware, "--profile": profile}.items():
        if scenario is not None and value is not None:
            raise MemboundError(f"option --scenario says that, too; leave {option} out, or use --set to change it")
    if set_ and scenario is None:
        raise MemboundError("option --set changes a scenario; give one with --scenario, too")
    given = None if scenario is None else scenario_of(scenario, set_)
    results = read_results(file)
    runs = []
    for number, result in enumerate(results, start=1):
        name = f"{file.stem}-{number}" if len(results) > 1 else file.stem
        runs.append(result.run(given or result.scenario(name, model, hardware, profile)))
        if not runs[-1].summary.completed:
            raise MemboundError(f"results file '{file}' has no request that was answered in its benchmark {number}")
    comparison = _compared(runs, file) if given is not None or hardware is not None else None
    store = Store(membound_home())
    ids = [keep_run(store, "measure", run.scenario, run) for run in runs]
    document: dict[str, Any] = {"runs": [{"run_id": id, **run.to_json()} for id, run in zip(ids, runs, strict=True)]}
    if comparison is not None:
        document |= {"run_id": keep_comparison(store, runs[0].scenario, comparison), **comparison.to_json()}
    print_result(document, as_json, _render)


def _compared(runs: list[RunResult], file: Path) -> Any:
    """Each run beside the prediction of its scenario."""
    from membound.app.endpoint_comparison import EndpointComparison, predict

    comparison = EndpointComparison([], {}, {})
    for run in runs:
        point = {"benchmark": run.scenario.name} if len(runs) > 1 else {}
        comparison.judge(point, predict(run.scenario), [run], f"imported from {file.name}")
    return comparison


def _render(document: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    from membound.app import report
    from membound.app.endpoint_comparison import comparison

    shown: list[RenderableType] = [report.run(run) for run in document["runs"]]
    if "metrics" in document:
        shown.append(comparison(document | {"notes": []}))
    return Group(*shown, *(f"kept as run {run['run_id']}" for run in document["runs"]))
