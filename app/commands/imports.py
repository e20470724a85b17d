"""How does a result of another tool get into the history, and beside what is predicted for it?"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from membound.app.commands.outputs import check_output, check_suffix
from membound.app.commands.terminal import JsonOption, SetOption, assigned, print_result, scenario_of
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from membound.roofline.results.result import RunResult, Summary

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="of vllm bench serve, SGLang, GuideLLM, AIPerf (JSON, JSON lines) or trtllm-bench (JSON, a log)",
    ),
]


def import_results(
    file: FileArgument,
    scenario: Annotated[str | None, typer.Option(metavar="SCENARIO", help="what was asked, where you know it")] = None,
    model: Annotated[str | None, typer.Option(help="the model, as the catalog calls it")] = None,
    hardware: Annotated[str | None, typer.Option(help="the device that served it: predicts the run, too")] = None,
    profile: Annotated[str | None, typer.Option(help="the engine that served it; vllm if not given")] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="OUT.csv", help="write it as rows for `membound validate`, too")
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep what another benchmark tool measured as a run; with hardware or a scenario, beside its prediction."""
    from membound.app.home import membound_home
    from membound.app.keeping import keep_comparison, keep_run
    from membound.app.store import Store
    from membound.roofline.models.files import resolve_model
    from membound.runtime.endpoint.foreign import read_results

    for option, value in {"--model": model, "--hardware": hardware, "--profile": profile}.items():
        if scenario is not None and value is not None:
            raise MemboundError(f"option --scenario says that, too; leave {option} out, or use --set to change it")
    if model is not None:
        resolve_model(model)  # refuses a name that nobody has
    given = None if scenario is None else scenario_of(scenario, set_)
    check_suffix("option --table", table, ".csv")
    check_output("option --table", table, [file, scenario or ""])
    if table is not None and given is None and hardware is None:
        raise MemboundError("option --table needs the device that served it; give --hardware or --scenario")
    results = read_results(file)
    runs = []
    for number, result in enumerate(results, start=1):
        name = f"{file.stem}-{number}" if len(results) > 1 else file.stem
        asked = given or result.scenario(name, model, hardware, profile).with_values(assigned(set_))
        runs.append(result.run(asked))
        if given is None and (alike := result.alike) is not None:
            runs[-1].provenance.notes.append(alike)
        if not runs[-1].summary.completed:
            raise MemboundError(f"results file '{file}' has no request that was answered in its benchmark {number}")
    comparison = _compared(runs, file) if given is not None or hardware is not None else None
    if table is not None:
        _write_table(table, runs, file)
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


def _write_table(path: Path, runs: list[RunResult], file: Path) -> None:
    """The runs as end-to-end measurements, a row for each run and metric."""
    from membound.roofline.validation.tables import END_TO_END_COLUMNS

    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, END_TO_END_COLUMNS, restval="")
        writer.writeheader()
        for run in runs:
            writer.writerows({**_conditions(run), "source": file.name, **row} for row in _metrics(run.summary))


def _conditions(run: RunResult) -> dict[str, Any]:
    """What a row says of the deployment and its load, which by Little's law is what was under way on average."""
    scenario, summary = run.scenario, run.summary
    setup, e2e_s = scenario.setup, summary.e2e_s.mean
    users = getattr(scenario.workload.arrivals, "concurrency", None)
    if users is None and e2e_s is not None:
        users = max(1.0, summary.requests_per_s * e2e_s)
    output = summary.output_tokens_per_s / summary.requests_per_s
    return {
        "engine": scenario.engine.profile,
        "gpu": scenario.hardware,
        "n_gpu": setup.parallel.devices,
        "tp": setup.parallel.tp,
        "pp": setup.parallel.pp,
        "model": scenario.model,
        "weight_dtype": setup.precision.weights.name,
        "act_dtype": setup.precision.activations.name,
        "kv_dtype": setup.precision.kv.name,
        "batch_or_concurrency": "" if users is None else f"{users:g}",
        "input_len": f"{max(summary.total_tokens_per_s / summary.requests_per_s - output, 1):.0f}",
        "output_len": f"{max(output, 1):.0f}",
        "notes": "concurrency, not batch",
        "trust": "B",
        "flags": "online",
    }


def _metrics(summary: Summary) -> Iterator[dict[str, Any]]:
    values = {"tpot_ms": summary.tpot_s.mean, "ttft_ms": summary.ttft_s.mean}
    yield from ({"metric": name, "value": f"{1e3 * value:.6g}"} for name, value in values.items() if value)
    yield {"metric": "throughput_tok_s_total", "value": f"{summary.output_tokens_per_s:.6g}"}


def _render(document: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    from membound.app.endpoint_comparison import comparison
    from membound.app.reports import run as run_report

    shown: list[RenderableType] = [comparison(document | {"notes": []})] if "metrics" in document else []
    shown += [run_report.run(run) for run in document["runs"]]
    return Group(*shown, *(f"kept as run {run['run_id']}" for run in document["runs"]))
