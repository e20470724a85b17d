"""Which deployment is the cheapest that meets the objective, and what lies on the front of speed against throughput?

Closed forms screen every device, precision and parallelism; the simulator then serves the workload on the few that
could be cheapest, with fewer replicas until the objective is missed, so that the answer is one that was seen to hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from membound.roofline.cost import StepCost, step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, catalog, get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.parallel import SINGLE
from membound.roofline.results.result import Summary
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import ClosedLoop, TraceArrivals
from membound.roofline.shape import StepShape
from membound.roofline.speculation.steps import checked_speculation
from membound.roofline.times.known import times_for
from membound.roofline.times.origin import origin_of
from membound.simulator.busiest import ENOUGH_REQUESTS, at_its_busiest, busiest_of, requests_seen
from membound.simulator.load import MOST_ROWS, Lengths, arrival_rate, recorded_times_s, think_s
from membound.simulator.planning.candidates import Demand, Replica, replicas_on
from membound.simulator.planning.front import FrontPoint, front_of, nearest_miss
from membound.simulator.planning.search import (
    Deployed,
    Objective,
    Searching,
    denser,
    meets,
    search,
)
from membound.simulator.planning.sensitivity import (
    Asking,
    Changed,
    Growing,
    Sensitivity,
    Slower,
    UpperEnd,
    ask,
    changes_of,
    grow,
    sensitivity_of,
    slow,
)
from membound.simulator.steady import check_context
from membound.simulator.sweeping.sweep import Workers

PRECISIONS = ("given", "8bit", "4bit")
Progress = Callable[[float, str], None]


def _silent(fraction: float, message: str) -> None:
    pass


@dataclass(frozen=True)
class Plan:
    """The answer, the confirmed runners-up, the best of each precision, and the front."""

    scenario: Scenario
    demand: Demand
    objective: Objective
    best: Deployed | None
    confirmed: tuple[Deployed, ...]
    options: dict[str, Deployed | None]
    front: tuple[FrontPoint, ...]
    sensitivity: Sensitivity | None
    screened: int
    simulated: int
    unpriced: tuple[str, ...]
    reason: str | None = None
    notes: tuple[str, ...] = ()
    upper_ends: dict[int, UpperEnd] = field(default_factory=dict)

    def upper_end(self, deployed: Deployed) -> UpperEnd | None:
        """Whether it holds at the upper end of its times' interval; None where nothing was simulated."""
        return self.upper_ends.get(id(deployed))


# --- what is asked for ---


def demand_of(scenario: Scenario) -> Demand:
    """The scenario's workload and objective; raises MemboundError where nothing is demanded of a latency."""
    slo = scenario.slo
    if slo.ttft_s is None and slo.tpot_s is None and slo.e2e_s is None:
        raise MemboundError("field 'slo' is empty; a plan needs a bound, such as slo={ttft_s: 1, tpot_s: 0.05}")
    workload = scenario.workload
    rate, arrivals = arrival_rate(workload), workload.arrivals
    clients = float(arrivals.concurrency) if isinstance(arrivals, ClosedLoop) else None
    demand = Demand(rate, clients, Lengths.of(workload), slo, think_s(workload))
    part = busiest_of(workload, min(requests_seen(workload), ENOUGH_REQUESTS))
    if part is None:
        return demand
    lengths = Lengths.of(workload.model_copy(update={"arrivals": part.arrivals}))
    return replace(demand, rate_rps=part.rate_rps, busiest=part.when, mean_rps=rate, lengths=lengths)


def devices_of(scenario: Scenario, names: Sequence[str] | None) -> list[HardwareSpec]:
    """Those named, else those of the scenario's sweep, else every accelerator of the catalog."""
    if names is not None:
        found = [get_hardware(name) for name in names]
        if twice := {spec.name for spec in found if found.count(spec) > 1}:
            raise MemboundError(f"option --devices names {', '.join(sorted(twice))} twice; each may be given once")
        return found
    swept = [point["hardware"] for point in scenario.sweep if isinstance(point.get("hardware"), str)]
    if swept:
        return [get_hardware(str(name)) for name in dict.fromkeys(swept)]
    return [spec for spec in catalog().values() if spec.kind != "cpu"]


# --- screening ---


@dataclass(frozen=True)
class _Screening:
    """What a worker does: every replica of a device."""

    scenario: Scenario
    device: HardwareSpec
    precisions: tuple[str, ...]
    lengths: Lengths

    def __call__(self) -> tuple[list[Replica], list[str]]:
        return replicas_on(self.scenario, self.device, self.precisions, self.lengths)


def _screen(task: _Screening) -> tuple[list[Replica], list[str]]:
    return task()


# --- the plan ---


def plan(
    scenario: Scenario,
    *,
    devices: Sequence[str] | None = None,
    precisions: Sequence[str] = PRECISIONS,
    objective: Objective = "cost",
    confirm: int = 3,
    disaggregate: bool = True,
    workers: Workers | None = None,
    progress: Progress = _silent,
) -> Plan:
    """The cheapest (or smallest) deployment that meets the scenario's objective, with `confirm` of them simulated.

    Deployments with prompts and outputs on engines of their own are among them where `disaggregate`: closed forms say
    too little of them, so that they take part only where something is simulated.

    Where nothing meets it, `best` is None and `reason` says by how much the nearest misses. Raises MemboundError where
    the scenario asks for nothing, or names something unknown.
    """
    if scenario.cluster is not None:
        raise MemboundError("field 'cluster' names replicas, and a plan chooses them; remove it, or simulate it")
    demand, specs = demand_of(scenario), devices_of(scenario, devices)
    if len(set(precisions)) < len(precisions) or not precisions:
        raise MemboundError("--precision needs names that differ; give some of given, 8bit, 4bit")
    plain = scenario.model_copy(update={"sweep": ()})
    model = resolve_model(plain.model)
    checked_speculation(plain.model_copy(update={"parallel": SINGLE}), model)  # no device could mend its drafter
    check_context(model, demand.lengths)
    tasks = [_Screening(plain, spec, tuple(precisions), demand.lengths) for spec in specs]
    crowd = workers or Workers("loky" if len(tasks) > 16 else "sequential")
    found = crowd.map(_screen, tasks, lambda done, message: progress(done * 0.5, f"devices screened: {message}"))
    replicas = [replica for listed, _ in found for replica in listed]
    reasons = [reason for _, listed in found for reason in listed]
    unpriced = tuple(spec.name for spec in specs if spec.price is None)
    if not replicas:
        raise MemboundError(f"no device can hold the model: {reasons[0] if reasons else 'none is given'}")

    searches = [
        Searching(
            tuple(one for one in replicas if one.precision.name == name),
            demand,
            objective,
            confirm if name == precisions[0] else min(confirm, 1),
            disaggregate,
        )
        for name in precisions
    ]
    crowd = workers or Workers("loky" if confirm else "sequential")
    answers = crowd.map(search, searches, lambda done, said: progress(0.5 + done * 0.3, f"precisions searched: {said}"))
    missed, runs = answers[0].nearest, sum(answer.runs for answer in answers)
    simulated = [one for answer in answers for one in answer.found if one.summary is not None]
    slower = {id(one): Slower(one, objective, _error_of(one.replica)) for one in simulated}
    said_of = crowd.map(slow, [*slower.values()], lambda done, said: progress(0.8 + done * 0.05, f"upper ends: {said}"))
    ends = dict(zip(slower, said_of, strict=True))
    ordered = [_holding_first(answer.found, ends, objective) for answer in answers]
    options = {name: found[0] if found else None for name, found in zip(precisions, ordered, strict=True)}
    confirmed, best = ordered[0], options[precisions[0]]
    pool = tuple(one for one in replicas if one.precision.name == precisions[0])
    changed: list[Changed] = []
    if best is not None:
        asked = [Asking(best, pool, objective, change, answers[0].seen, disaggregate) for change in changes_of(demand)]
        changed = crowd.map(ask, asked, lambda done, said: progress(0.85 + done * 0.1, f"inputs changed: {said}"))
    if best is not None and id(best) in ends and not ends[id(best)].holds:
        known = next((one for one in confirmed if ends[id(one)].holds), None)
        growing = [Growing(slower[id(one)], known, disaggregate) for one in confirmed if not ends[id(one)].holds]
        grown = crowd.map(grow, growing, lambda done, said: progress(0.95 + done * 0.05, f"upper ends: {said}"))
        enough = [one for one in (known, *grown) if one is not None]
        first = min(enough, key=lambda deployed: deployed.rank(objective), default=None)
        ends[id(best)] = replace(ends[id(best)], enough=first)
    progress(1.0, "done")
    reason = None
    if best is None:
        near = missed.said if missed is not None else nearest_miss(pool or replicas, demand)
        reason = f"nothing in precision '{precisions[0]}' meets the objective; {near}"
    return Plan(
        plain,
        demand,
        objective,
        best,
        tuple(confirmed),
        options,
        tuple(front_of(replicas, demand.slo)),
        None if best is None else sensitivity_of(best, pool, objective, changed),
        len(replicas),
        runs,
        unpriced,
        reason,
        tuple(_notes(scenario, demand, unpriced, objective)),
        ends,
    )


def _holding_first(found: Sequence[Deployed], ends: Mapping[int, UpperEnd], objective: Objective) -> list[Deployed]:
    """By rank; of those that rank alike the ones first that also hold at the upper end of their times."""

    def place(one: Deployed) -> tuple[float, ...]:
        end = ends.get(id(one))
        return (*one.rank(objective), float(end is None or not end.holds))

    return sorted(found, key=place)


def _notes(scenario: Scenario, demand: Demand, unpriced: Sequence[str], objective: Objective) -> Iterator[str]:
    if demand.busiest is not None:
        yield (
            f"sized for the busiest part: {demand.rate_rps:.3g} requests/s {demand.busiest}, where the mean is "
            f"{demand.mean_rps:.3g}; costs of tokens are those of the mean"
        )
    arrivals = scenario.workload.arrivals
    if isinstance(arrivals, TraceArrivals):
        if len(recorded_times_s(arrivals)) == MOST_ROWS:
            yield f"of the trace the first {MOST_ROWS:,} rows are looked at; workload.arrivals.start_s begins later"
        if scenario.workload.requests is None:
            yield f"up to {ENOUGH_REQUESTS:,} requests of the trace are simulated; workload.requests names another"
    if unpriced:
        ranked = "; they rank after all that have one" if objective == "cost" else ""
        yield f"no price is known for {', '.join(unpriced)}{ranked}"
    if arrivals.kind not in ("poisson", "closed_loop"):
        yield "each replica is given the arrivals' shape at its share of the rate, as if a router chose by chance"


# --- the most that a deployment serves ---


def max_rate(scenario: Scenario, *, tolerance: float = 0.03, progress: Progress = _silent) -> tuple[float, Summary]:
    """The largest mean rate at which the scenario's own deployment meets its objective in the simulator, by bracketing.

    Where arrivals vary beyond what a run sees, it meets the objective in their busiest part.
    Raises MemboundError where even the lowest rate misses it.
    """
    from membound.simulator.run import run

    demand = demand_of(scenario)
    if demand.rate_rps is None:
        raise MemboundError("a largest rate needs open arrivals; give workload.arrivals={kind: poisson, rate_rps: 1}")
    start = demand.mean_rps or demand.rate_rps
    plain = scenario.model_copy(update={"sweep": ()})
    tried: dict[float, Summary] = {}

    def good(rate: float) -> bool:
        progress(min(0.95, len(tried) / 20.0), f"{rate:.3g} requests/s")
        asked = plain.with_value("workload.arrivals", denser(plain, rate / start))
        tried[rate] = run(at_its_busiest(asked)).summary
        return meets(tried[rate], demand.slo)

    low, high = start, start
    if good(start):
        while good(high := 2.0 * high):
            low = high
            if high > 2.0**20 * start:
                raise MemboundError("the objective is met at any rate; give a tighter slo")
    else:
        while not good(low := low / 2.0):
            high = low
            if low < start / 2.0**12:
                raise MemboundError("not even one request at a time meets the objective; give a looser slo")
    while high - low > tolerance * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low, tried[low]


# --- what `membound plan --json` prints ---


def to_json(found: Plan) -> dict[str, Any]:
    demand = found.demand
    return {
        "best": _deployed_json(found, found.best),
        "reason": found.reason,
        "front": [_front_json(point) for point in found.front],
        "confirmed": [_deployed_json(found, one) for one in found.confirmed],
        "options": {name: _deployed_json(found, one) for name, one in found.options.items()},
        "sensitivity": None
        if found.sensitivity is None
        else {
            "binds": found.sensitivity.binds,
            "elasticity": found.sensitivity.elasticity,
            "screened_answer": found.sensitivity.screened_answer,
            "answer_changes": found.sensitivity.answer_changes,
            "changed": [_changed_json(one) for one in found.sensitivity.changed],
        },
        "demand": {
            "model": found.scenario.model,
            "rate_rps": demand.rate_rps,
            "mean_rps": demand.mean_rps or demand.rate_rps,
            "busiest": demand.busiest,
            "concurrency": demand.concurrency,
            "think_s": demand.think_s,
            "prompt_tokens": demand.lengths.prompt_tokens,
            "output_tokens": demand.lengths.output_tokens,
            "slo": demand.slo.model_dump(),
            "profile": found.scenario.engine.profile,
        },
        "objective": found.objective,
        "screened": found.screened,
        "simulated": found.simulated,
        "unpriced": list(found.unpriced),
        "notes": list(found.notes),
    }


def _error_of(replica: Replica) -> float:
    """The relative interval of a decode step's time, at half its seats."""
    return float(_step_of(replica).relative_error)


def _step_of(replica: Replica) -> StepCost:
    model, setup = resolve_model(replica.scenario.model), replica.scenario.setup
    times = times_for(replica.hardware, setup.profile)
    return step_cost(model, setup, times, StepShape.decode(max(1.0, replica.seats / 2.0), replica.lengths.context))


def _upper_end_json(end: UpperEnd | None) -> dict[str, Any] | None:
    if end is None:
        return None
    enough = end.enough
    return {
        "relative_error": end.error,
        "meets_slo": end.holds,
        "gpus_that_meet_it": None if enough is None else enough.gpus,
        "device_that_meets_it": None if enough is None else enough.replica.hardware.name,
    }


def _changed_json(one: Changed) -> dict[str, Any]:
    answer = one.answer
    return {
        "input": one.name,
        "easier": one.easier,
        "changes": one.changes,
        "device": None if answer is None else answer.replica.hardware.name,
        "gpus": None if answer is None else answer.gpus,
        "usd_per_h": None if answer is None else answer.usd_per_h,
    }


def _origin_json(replica: Replica) -> dict[str, Any]:
    """What the device's times rest on: its own measurements, or its relatives', in a decode step of half its seats."""
    times, cost = times_for(replica.hardware, replica.scenario.setup.profile), _step_of(replica)
    origin = origin_of(times, cost.operators, float(cost.time_s))
    return {
        "kind": origin.kind,
        "measured_share": origin.measured_share,
        "inherited_from": list(origin.inherited_from),
        "relative_error": float(cost.relative_error),
    }


def _parts(replica: Replica, engines: int = 1) -> dict[str, Any]:
    scenario = replica.scenario
    return {
        "precision": replica.precision.name,
        "lossless": replica.precision.lossless,
        "lossy": list(replica.precision.lossy),
        "techniques": [technique.model_dump(mode="json") for technique in scenario.techniques],
        "parallel": replica.parallel.degrees(),
        "gpus_per_replica": replica.devices * engines,
        "max_num_seqs": scenario.seats,
        "max_batched_tokens": scenario.engine.max_batched_tokens,
        "batching": scenario.engine.batching,
    }


def _deployed_json(found: Plan, deployed: Deployed | None) -> dict[str, Any] | None:
    if deployed is None:
        return None
    replica, demand = deployed.replica, deployed.demand
    pools = deployed.prompt_engines
    estimate = None if pools else replica.at(demand, np.array([demand.amount / deployed.replicas]))._asdict()
    price = replica.hardware.price
    parts = _parts(replica, pools + deployed.replicas if pools else 1)
    ratio = {"prefill_engines": pools, "decode_engines": deployed.replicas} if pools else None
    return {
        "device": replica.hardware.name,
        "gpus": deployed.gpus,
        "deployment": {"replicas": 1 if pools else deployed.replicas, **parts, "disaggregation": ratio},
        "summary": None if deployed.summary is None else deployed.summary.model_dump(mode="json"),
        "estimate": estimate and {name: _finite(float(value[0])) for name, value in estimate.items()},
        "requests_per_s": deployed.requests_per_s,
        "output_tokens_per_s": deployed.output_tokens_per_s,
        "usd_per_h": deployed.usd_per_h,
        "cost_usd_per_million_tokens": deployed.usd_per_million_tokens,
        "price": None if price is None else price.model_dump(mode="json"),
        "origin": _origin_json(replica),
        "upper_end": _upper_end_json(found.upper_end(deployed)),
        "energy_j_per_token_at_board_power": deployed.energy_j_per_token,
        "scenario": deployed.scenario.model_dump(mode="json"),
    }


def _front_json(point: FrontPoint) -> dict[str, Any]:
    return {
        "device": point.replica.hardware.name,
        "gpus": point.replica.devices,
        "deployment": _parts(point.replica),
        "batch": point.batch,
        "tokens_per_s_per_user": point.user_tokens_per_s,
        "tokens_per_s_per_gpu": point.gpu_tokens_per_s,
        "ttft_s": point.ttft_s,
        "meets_slo": point.meets_slo,
        "cost_usd_per_million_tokens": point.usd_per_million_tokens,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
