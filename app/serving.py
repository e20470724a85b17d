"""How is a workload served under different policies: the runs, as the page draws them and as files?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from membound.app.keeping import result_tables, table_of
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.results.result import BOUNDS, Column, Provenance, RunResult, Summary
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.times.known import times_for
from membound.simulator.drafting import with_best_drafts
from membound.simulator.run import certainty_of, deploy, run
from membound.simulator.scheduling.request import Outcome, Step
from membound.simulator.timeline import PHASES, PhaseLog, Timeline

if TYPE_CHECKING:
    from membound.app.records import Run
    from membound.app.worker import JobContext

# What else may decide, on the same requests: the field that a policy's name replaces.
POLICIES = {
    "static": "engine.batching",
    "continuous": "engine.batching",
    "prefill_first": "engine.batching",
    "chunked_prefill": "engine.batching",
    "fcfs": "engine.order",
    "deadline": "engine.order",
    "slack": "engine.order",
    "round_robin": "cluster.router",
    "random": "cluster.router",
    "least_loaded": "cluster.router",
    "power_of_two": "cluster.router",
    "prefix_aware": "cluster.router",
}
GIVEN = "given"
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
BINS = 240
# Finer where the tail is.
SHARES = (*np.linspace(0.0, 0.98, 99).tolist(), 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 1.0)


def value_of(scenario: Scenario, policy: str) -> str | None:
    """What the scenario itself says where a policy would; None where it has no such part."""
    if POLICIES[policy] == "cluster.router":
        return None if scenario.cluster is None else scenario.cluster.router
    return scenario.engine.order if POLICIES[policy] == "engine.order" else scenario.engine.batching


def variants(scenario: Scenario, policies: Iterable[str]) -> dict[str, Scenario]:
    """The scenario as it is given, and under each other policy; raises MemboundError where one does not suit it."""
    found = {GIVEN: scenario.model_copy(update={"sweep": ()})}
    for policy in policies:
        if policy not in POLICIES:
            raise MemboundError(f"policy '{policy}' is unknown; give some of {', '.join(POLICIES)}")
        if value_of(scenario, policy) != policy:
            found[policy] = _under(found[GIVEN], policy)
    return found


def _under(scenario: Scenario, policy: str) -> Scenario:
    if POLICIES[policy] == "cluster.router" and scenario.cluster is None:
        raise MemboundError(f"policy '{policy}' is a router's, and one replica needs none; give more replicas")
    if policy == "static":  # a technique that makes batches continuous would contradict it
        kept = tuple(one for one in scenario.techniques if one.name != "continuous_batching")
        scenario = scenario.with_techniques(kept)
    if policy == "prefix_aware":
        scenario = scenario.with_value("engine.prefix_caching", True)
    return scenario.with_value(POLICIES[policy], policy)


def serve(scenario: Scenario, policies: Iterable[str], context: JobContext) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every variant served by the simulator: one document of all, and the tables of each."""
    from membound.app.reports.drafts import drafting

    asked = variants(scenario, policies)
    cases: list[dict[str, Any]] = []
    tables: dict[str, Any] = {}
    for index, (name, variant) in enumerate(asked.items()):
        chosen, parameters = with_best_drafts(variant)
        log = PhaseLog()
        result = run(chosen, observer=_watched(log, context, name, index, len(asked), chosen.workload.requests))
        if parameters is not None and not parameters.get("replayed"):
            result.provenance.notes.append(drafting(parameters))
        cases.append({"name": name, **case_of(result)})
        for table, columns in result_tables(result).items():
            tables[f"{table}.{name}"] = columns
        tables[f"changes.{name}"] = _changes(log)
    return {"cases": cases}, tables


def _watched(
    log: PhaseLog, context: JobContext, name: str, index: int, count: int, requests: int | None
) -> Callable[[Step, Outcome, float], None]:
    """Listens to a run: keeps its phases, says how far it is, and stops it where it was cancelled."""
    admitted = 0

    def observer(step: Step, outcome: Outcome, end_s: float) -> None:
        nonlocal admitted
        log(step, outcome, end_s)
        admitted += len(step.admitted)
        context.check_cancelled()
        share = min(1.0, admitted / requests) if requests else 0.0
        context.progress(
            (index + share) / count, f"{name} ({index + 1}/{count}): {admitted:,} requests, {end_s:,.0f} s"
        )

    return observer


# --- what the page draws of a run ---


def case_of(result: RunResult) -> dict[str, Any]:
    """Summary, distributions and what happened over time, small enough to be drawn.

    `relative_error` is within what a step's time is meant to be.
    """
    scenario = result.scenario
    document, setup, steps = result.to_json(), scenario.setup, result.steps
    times = times_for(get_hardware(scenario.hardware), setup.profile)
    known = certainty_of(resolve_model(scenario.model), setup, times, steps) if len(steps["time_s"]) else times
    return document | {
        "relative_error": known.relative_error,
        "quantiles": {name: quantiles for name in LATENCIES if (quantiles := _quantiles(result, name))},
        "over_time": over_time(result),
    }


def _quantiles(result: RunResult, name: str) -> list[float] | None:
    """The latency that each share of SHARES does not exceed; None where nothing was sampled."""
    if name == "itl_s":
        found = result.itl_s.percentiles([100 * share for share in SHARES])
        return None if None in found else [float(value) for value in found if value is not None]
    done = result.requests["completed"]
    requests = {key: column[done] for key, column in result.requests.items()}
    since, until = {
        "ttft_s": ("arrival_s", "first_token_s"),
        "tpot_s": ("first_token_s", "finished_s"),
        "e2e_s": ("arrival_s", "finished_s"),
    }[name]
    values = requests[until] - requests[since]
    if name == "tpot_s":
        several = requests["output_tokens"] > 1
        values = values[several] / (requests["output_tokens"][several] - 1)
    return np.quantile(values, SHARES).tolist() if len(values) else None


def over_time(result: RunResult, bins: int = BINS, from_s: float = 0.0, to_s: float | None = None) -> dict[str, Any]:
    """Means over each of equal parts of the time from `from_s` to `to_s`.

    `bounds`: engines that compute, by what bounds their steps. `running` and `waiting`: requests that were admitted,
    and that were not yet; a preempted one counts as running. `kv_gib`: KV memory in use on all devices, of
    `kv_capacity_gib`, which is None where replicas come and go.
    """
    end_s = float(result.summary.duration_s) if to_s is None else to_s
    edges = np.linspace(from_s, max(end_s, from_s + 1e-9), bins + 1)
    steps, requests = result.steps, result.requests
    starts, ends = steps["start_s"], steps["start_s"] + steps["time_s"]
    began = np.isfinite(requests["admitted_s"]) & np.isfinite(requests["finished_s"])
    arrival, admitted, finished = (requests[name][began] for name in ("arrival_s", "admitted_s", "finished_s"))
    ones = np.ones(len(arrival))
    held_gib, capacity_gib = _kv_gib(result)
    return {
        "edges_s": edges.tolist(),
        "bounds": {bound: _means(starts, ends, steps[bound], edges) for bound in BOUNDS if bound != "idle"},
        "running": _means(admitted, finished, ones, edges),
        "waiting": _means(arrival, admitted, ones, edges),
        "kv_gib": _means(starts, ends, held_gib, edges),
        "kv_capacity_gib": capacity_gib,
        "engines": engines_of(result.scenario),
    }


def engines_of(scenario: Scenario) -> int | None:
    """How many engines serve; None where their number changes."""
    if scenario.cluster is not None:
        scaled = any(group.autoscaling for group in scenario.cluster.groups)
        return None if scaled else sum(group.count for group in scenario.cluster.groups)
    pools = scenario.engine.disaggregation
    return 1 if pools is None else pools.prefill_engines + pools.decode_engines


def _kv_gib(result: RunResult) -> tuple[NDArray[np.float64], float | None]:
    """KV memory that each row of steps holds, and that of all engines."""
    from membound.simulator.cluster.run import scenario_of

    scenario, engines = result.scenario, engines_of(result.scenario)
    groups = [scenario] if scenario.cluster is None else [scenario_of(scenario, one) for one in scenario.cluster.groups]
    block, whole = [], []
    for one in groups:
        memory = deploy(one)[0].memory
        block.append(memory.block_bytes * one.parallel.devices / 2**30)
        whole.append(block[-1] * memory.num_blocks)
    used = result.steps["blocks_used"]
    if scenario.cluster is None or result.cluster is None:
        return used * block[0], whole[0] * (engines or 1)
    group_of = np.array([replica.group for replica in result.cluster.replicas])
    counts = [group.count for group in scenario.cluster.groups]
    capacity = None if engines is None else float(np.dot(whole, counts))
    return used * np.array(block)[group_of[result.steps["replica"].astype(int)]], capacity


def _means(starts: Column, ends: Column, weights: Column, edges: NDArray[np.float64]) -> list[float]:
    """The mean, over the time between each two edges, of the weights of all intervals that are open."""
    moments = np.concatenate([starts, ends])
    changes = np.concatenate([weights, -np.asarray(weights)])
    order = np.argsort(moments, kind="stable")
    moments, rates = moments[order], np.cumsum(changes[order])
    if not len(moments):
        return [0.0] * (len(edges) - 1)
    areas = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(moments))])
    at = np.interp(edges, moments, areas)
    return np.maximum(0.0, np.diff(at) / np.diff(edges)).tolist()


# --- a run as files ---


def _changes(log: PhaseLog) -> Any:
    """When requests were preempted and went on, as a table; the phase by its number."""
    rows = [(id, at_s, PHASES.index(phase)) for id, listed in log.changes.items() for at_s, phase in listed]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return table_of(dict(zip(("request", "at_s", "phase"), columns, strict=True)))


def result_of(kept: Run, case: Mapping[str, Any]) -> tuple[RunResult, PhaseLog]:
    """A variant of a kept run as it was, but for its gaps between tokens."""
    tables = {
        name: {column: values.to_numpy(zero_copy_only=False) for column, values in _columns(kept, name, case).items()}
        for name in ("requests", "steps", "changes")
    }
    log = PhaseLog()
    for id, at_s, phase in zip(
        *(tables["changes"][name].tolist() for name in ("request", "at_s", "phase")), strict=True
    ):
        log.changes.setdefault(int(id), []).append((at_s, PHASES[int(phase)]))
    result = RunResult(
        parse_scenario(case["scenario"]),
        Summary.model_validate(case["summary"]),
        Provenance.model_validate(case["provenance"]),
        tables["requests"],
        tables["steps"],
        Samples(),
    )
    return result, log


def _columns(kept: Run, name: str, case: Mapping[str, Any]) -> dict[str, Any]:
    table = kept.table(f"{name}.{case['name']}")
    return {column: table[column] for column in table.column_names}


def perfetto(kept: Run, case: Mapping[str, Any]) -> str:
    """The timeline of a variant, as Perfetto and Chrome's viewer read it."""
    return Timeline.of(*result_of(kept, case)).to_chrome()
