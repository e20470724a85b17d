"""How are results kept, so that every page and every later day finds them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from membound.app.checkout import commit
from membound.app.compare import ComparisonResult
from membound.app.store import Store
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import is_local, local_hardware
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario


def keep_run(store: Store, kind: str, scenario: Scenario, result: RunResult, job_id: str | None = None) -> str:
    """Keeps a simulated or measured run and returns its id; of a measured one also where and how it was measured."""
    document = result.to_json()
    kept = None if result.provenance.producer == "simulator" else document
    conditions = conditions_of(scenario, [result])
    return _keep(store, kind, scenario, document["summary"], result_tables(result), job_id, conditions, kept)


def keep_comparison(store: Store, scenario: Scenario, result: ComparisonResult, job_id: str | None = None) -> str:
    """Keeps a comparison with all its runs and returns its id."""
    summary = {"rows": len(result.rows)}
    conditions = conditions_of(scenario, [run for runs in result.measured.values() for run in runs])
    return _keep(store, "compare", scenario, summary, comparison_tables(result), job_id, conditions, result.to_json())


def _keep(
    store: Store,
    kind: str,
    scenario: Scenario,
    summary: Mapping[str, Any],
    tables: Mapping[str, Any],
    job_id: str | None,
    conditions: Mapping[str, Any],
    comparison: Mapping[str, Any] | None = None,
) -> str:
    return store.save_run(
        kind=kind,
        label=scenario.name,
        digest=scenario.digest,
        scenario_yaml=scenario.to_yaml(),
        summary=summary,
        tables=tables,
        comparison=comparison,
        job_id=job_id,
        conditions=conditions,
    )


def conditions_of(scenario: Scenario, runs: Sequence[RunResult]) -> dict[str, Any]:
    """With which code runs were made and, of those on this machine, on what: what two runs may differ in unseen."""
    conditions: dict[str, Any] = {"membound": version("membound"), "commit": commit()}
    here = [run for run in runs if run.provenance.producer == "runtime"]
    if is_local(scenario.hardware) and (here or all(run.provenance.producer == "simulator" for run in runs)):
        conditions |= _of_this_machine()
    if here:
        conditions |= dict(here[-1].provenance.versions)
        conditions["stalls"] = sum(run.provenance.stalls for run in here)
    return conditions


def _of_this_machine() -> dict[str, Any]:
    try:
        calibration = local_hardware().calibration
    except MemboundError:  # whoever made the run had one of their own
        return {}
    assert calibration is not None, "this machine is known by its calibration"
    return {"machine": calibration.machine, "threads": calibration.threads, "calibrated": calibration.created}


def table_of(columns: Mapping[str, Any]) -> Any:
    """A table of records as pyarrow has it, for the store."""
    import pyarrow

    return pyarrow.table(dict(columns))


def result_tables(result: RunResult) -> dict[str, Any]:
    """The tables of a run that the store keeps."""
    return {"requests": table_of(result.requests), "steps": table_of(result.steps)}


def comparison_tables(result: ComparisonResult) -> dict[str, Any]:
    """All runs of a comparison in one table of requests and one of steps, with what each row belongs to."""
    import pyarrow

    tables: dict[str, list[Any]] = {"requests": [], "steps": []}
    for producer, key, repeat, run in _all_runs(result):
        for name, table in result_tables(run).items():
            rows = table.num_rows
            point, technique = key
            for column, value in (
                ("repeat", repeat),
                ("technique", technique),
                ("point", point),
                ("producer", producer),
            ):
                table = table.add_column(0, column, pyarrow.array([value] * rows))
            tables[name].append(table)
    # A server's table of requests has columns that the simulator's lacks, such as why a request failed.
    kept = {name: parts for name, parts in tables.items() if parts}
    return {name: pyarrow.concat_tables(parts, promote_options="permissive") for name, parts in kept.items()}


def _all_runs(result: ComparisonResult) -> Iterator[tuple[str, tuple[int, str], int, RunResult]]:
    for key, run in result.predicted.items():
        yield run.provenance.producer, key, 0, run
    for key, runs in result.measured.items():
        for repeat, run in enumerate(runs):
            yield run.provenance.producer, key, repeat, run
