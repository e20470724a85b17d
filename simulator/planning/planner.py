"""Which deployment is the cheapest that meets the objective, and what lies on the front of speed against throughput?

Closed forms screen every device, precision and parallelism; the simulator then serves the workload on the few that
could be cheapest, with fewer replicas until the objective is missed, so that the answer is one that was seen to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, catalog, get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.parallel import SINGLE
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import ClosedLoop, TraceArrivals
from membound.roofline.shape import StepShape
from membound.roofline.speculation.steps import checked_speculation
from membound.roofline.times.certainty import Certainty
from membound.roofline.times.known import times_for
from membound.simulator.busiest import ENOUGH_REQUESTS, busiest_of, requests_seen
from membound.simulator.load import MOST_ROWS, Lengths, arrival_rate, recorded_times_s, think_s
from membound.simulator.planning.candidates import Demand, Replica, replicas_on
from membound.simulator.planning.deployed import Deployed, Objective
from membound.simulator.planning.front import FrontPoint, front_of, nearest_miss
from membound.simulator.planning.search import Searching, search
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


def silent(fraction: float, message: str) -> None:
    """Tells nobody."""


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
    progress: Progress = silent,
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
    served = demand.lengths.within(model.max_context)
    refused = 1.0 - len(served.prompts) / len(demand.lengths.prompts)
    demand = replace(demand, lengths=served)
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
    slower = {id(one): Slower(one, objective, certainty_of(one.replica).relative_error) for one in simulated}
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
        tuple(_notes(scenario, demand, unpriced, objective, refused)),
        ends,
    )


def _holding_first(found: Sequence[Deployed], ends: Mapping[int, UpperEnd], objective: Objective) -> list[Deployed]:
    """By rank; of those that rank alike the ones first that also hold at the upper end of their times."""

    def place(one: Deployed) -> tuple[float, ...]:
        end = ends.get(id(one))
        return (*one.rank(objective), float(end is None or not end.holds))

    return sorted(found, key=place)


def certainty_of(replica: Replica) -> Certainty:
    """How far off a decode step of a replica at half its seats may be, and on what it rests."""
    model, setup = resolve_model(replica.scenario.model), replica.scenario.setup
    times = times_for(replica.hardware, setup.profile)
    return Certainty.of(model, setup, times, StepShape.decode(max(1.0, replica.seats / 2.0), replica.lengths.context))


def _notes(
    scenario: Scenario, demand: Demand, unpriced: Sequence[str], objective: Objective, refused: float
) -> Iterator[str]:
    if refused:
        model = resolve_model(scenario.model)
        yield (
            f"{refused:.2%} of the requests have more than the {model.max_context} tokens of {model.name}'s context: "
            "every engine refuses them, and they do not count"
        )
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
            enough = f"up to {ENOUGH_REQUESTS:,} requests of the trace are simulated"
            yield f"{enough}; workload.requests names another number"
    if unpriced:
        ranked = "; they rank after all that have one" if objective == "cost" else ""
        yield f"no price is known for {', '.join(unpriced)}{ranked}"
    if arrivals.kind not in ("poisson", "closed_loop"):
        yield "each replica is given the arrivals' shape at its share of the rate, as if a router chose by chance"
