"""Which deployment is the cheapest that meets the objective, and what lies on the front of speed against throughput?

Closed forms screen every device, precision and parallelism; the simulator then serves the workload on the few that
could be cheapest, with fewer replicas until the objective is missed, so that the answer is one that was seen to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, catalog, get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.parallel import SINGLE
from membound.roofline.progress import Progress, silent
from membound.roofline.results.result import Summary
from membound.roofline.scenario import Scenario
from membound.roofline.shape import StepShape
from membound.roofline.speculation.steps import checked_speculation
from membound.roofline.times.certainty import Certainty
from membound.roofline.times.known import times_for
from membound.simulator.deployment import check_context
from membound.simulator.load import Lengths
from membound.simulator.planning.candidates import ReplicaCurves, replicas_on
from membound.simulator.planning.compared import Compared, Comparing, HoldingSlower, safest
from membound.simulator.planning.demand import Demand, Objective, demand_of, notes_of
from membound.simulator.planning.deployed import Deployed, Key
from membound.simulator.planning.front import FrontPoint, front_of, nearest_miss
from membound.simulator.planning.search import Found, Searching, screened_best
from membound.simulator.planning.sensitivity import (
    Asking,
    Changed,
    Growing,
    Sensitivity,
    Slower,
    UpperEnd,
    changes_of,
    sensitivity_of,
)
from membound.simulator.planning.verdict import Missed
from membound.simulator.workers import Workers

PRECISIONS = ("given", "8bit", "4bit")


@dataclass(frozen=True)
class Plan:
    """The answer, the confirmed runners-up, the best of each precision and of each device, and the Pareto front.

    `missing` says what a plan that is not whole yet lacks.
    """

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
    upper_ends: Mapping[Key, UpperEnd] = field(default_factory=dict)
    compared: tuple[Compared, ...] = ()
    missing: str | None = None

    def __repr__(self) -> str:
        """One line, as a notebook shows it: the front alone is pages."""
        found = self.reason if self.best is None else f"{self.best.gpus} x {self.best.replica.hardware.name}"
        return (
            f"<Plan: {self.scenario.name}, best {found}, {len(self.confirmed)} confirmed, {len(self.front)} in front>"
        )

    def upper_end(self, deployed: Deployed) -> UpperEnd | None:
        """Whether it holds at the upper end of its times' interval; None where nothing was simulated."""
        return self.upper_ends.get(deployed.key)


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


def _own(scenario: Scenario, names: Sequence[str]) -> list[str]:
    """The scenario's own device where it is among those of these names."""
    try:
        own = get_hardware(scenario.hardware).name
    except MemboundError:  # no plan needs it: it may be this machine, uncalibrated
        return []
    return [name for name in names if name == own]


@dataclass(frozen=True)
class _Screening:
    """What a worker does: every replica of a device."""

    scenario: Scenario
    device: HardwareSpec
    precisions: tuple[str, ...]
    lengths: Lengths

    def __call__(self) -> tuple[list[ReplicaCurves], list[str]]:
        return replicas_on(self.scenario, self.device, self.precisions, self.lengths)


def plan(
    scenario: Scenario,
    *,
    devices: Sequence[str] | None = None,
    precisions: Sequence[str] = PRECISIONS,
    objective: Objective = "cost",
    confirm: int = 3,
    disaggregate: bool = True,
    compares: bool = False,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> Plan:
    """The cheapest (or smallest) deployment that meets the scenario's objective, with `confirm` of them simulated.

    Deployments with prompts and outputs on engines of their own are among them where `disaggregate`: closed forms say
    too little of them, so that they take part only where something is simulated. With `compares` the best of each
    device that was named, and of both ways to serve, is looked for too.

    Where nothing meets it, `best` is None and `reason` says by how much the nearest misses. Raises MemboundError where
    the scenario asks for nothing, or names something unknown.
    """
    options = Options(tuple(precisions), objective, confirm, disaggregate, compares)
    *_, whole = plan_by_stages(scenario, devices, options, workers, progress)
    return whole


@dataclass(frozen=True)
class Options:
    """How a plan is looked for, as `plan` says."""

    precisions: tuple[str, ...] = PRECISIONS
    objective: Objective = "cost"
    confirm: int = 3
    disaggregate: bool = True
    compares: bool = True


def plan_by_stages(
    scenario: Scenario,
    devices: Sequence[str] | None,
    options: Options,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> Iterator[Plan]:
    """The plan in stages, each more complete than the last: from closed forms alone, confirmed by the simulator, with
    other devices compared, with the upper ends of predicted times, and whole. `missing` says what a stage lacks."""
    if scenario.cluster is not None:
        raise MemboundError("field 'cluster' names replicas, and a plan chooses them; remove it, or simulate it")
    demand, specs, precisions = demand_of(scenario), devices_of(scenario, devices), options.precisions
    if len(set(precisions)) < len(precisions) or not precisions:
        raise MemboundError("--precision needs names that differ; give some of given, 8bit, 4bit")
    plain = scenario.model_copy(update={"sweep": ()})
    model = resolve_model(plain.model)
    checked_speculation(plain.model_copy(update={"parallel": SINGLE}), model)  # no device could mend its drafter
    check_context(model, demand.lengths)
    served = demand.lengths.within(model.max_context)
    refused = 1.0 - len(served.prompts) / len(demand.lengths.prompts)
    demand = replace(demand, lengths=served)
    tasks = [_Screening(plain, spec, precisions, demand.lengths) for spec in specs]
    crowd = workers or Workers("loky" if len(tasks) > 16 else "sequential")
    found = crowd.calls(tasks, lambda done, message: progress(done * 0.3, f"devices screened: {message}"))
    replicas = [replica for listed, _ in found for replica in listed]
    reasons = {spec.name: listed[0] for spec, (_, listed) in zip(specs, found, strict=True) if listed}
    unpriced = tuple(spec.name for spec in specs if spec.price is None)
    if not replicas:
        raise MemboundError(f"no device can hold the model: {next(iter(reasons.values()), 'none is given')}")
    of = {name: tuple(one for one in replicas if one.precision.name == name) for name in precisions}
    screened = {name: screened_best(listed, demand, options.objective) for name, listed in of.items()}
    first = screened[precisions[0]]
    names = [spec.name for spec in specs]
    named = [*names] if devices is not None or scenario.sweep else [None, *_own(scenario, names)]
    planning = _Planning(of, options, named, reasons, progress, workers)
    known = Plan(
        plain,
        demand,
        options.objective,
        first,
        () if first is None else (first,),
        screened,
        tuple(front_of(replicas, demand.slo)),
        None,
        len(replicas),
        0,
        unpriced,
        None if first else planning.no_answer(demand),
        tuple(notes_of(scenario, demand, unpriced, options.objective, refused)),
        missing="closed forms alone answer, as nothing was simulated yet",
    )
    if options.confirm:
        yield known
    yield from planning.stages(known)


@dataclass(frozen=True)
class _Planning:
    """What comes after the screening: `replicas` by precision, the devices that were asked for (None: all), and why
    some of them hold no replica."""

    replicas: dict[str, tuple[ReplicaCurves, ...]]
    options: Options
    named: Sequence[str | None]
    reasons: Mapping[str, str]
    progress: Progress
    workers: Workers | None

    @property
    def crowd(self) -> Workers:
        return self.workers or Workers("loky" if self.options.confirm else "sequential")

    @property
    def pool(self) -> tuple[ReplicaCurves, ...]:
        return self.replicas[self.options.precisions[0]]

    def told(self, begin: float, end: float, what: str) -> Progress:
        return lambda done, said: self.progress(begin + done * (end - begin), f"{what}: {said}")

    def stages(self, known: Plan) -> Iterator[Plan]:
        options, screened = self.options, known.best
        answers = self._searched(known)
        found = [one for answer in answers for one in answer.found]
        known = replace(self._with_answers(known, [answer.found for answer in answers]), simulated=_runs(answers))
        if known.best is None:
            known = replace(known, reason=self.no_answer(known.demand, answers[0].nearest))
        yield replace(known, missing="other devices, upper ends of times and changed inputs were not looked at yet")
        if options.compares:
            known = replace(known, compared=tuple(self._compared(known, answers[0], found)))
            yield replace(known, missing="upper ends of times and changed inputs were not looked at yet")
        if any(one.summary is not None for one in (*found, *(other.best for other in known.compared if other.best))):
            known = self._with_upper_ends(known, answers)
            yield replace(known, missing="changed inputs were not looked at yet")
        if known.best is not None:
            changed = self._changed(known.best, answers[0].seen)
            known = replace(known, sensitivity=sensitivity_of(known.best, screened, changed))
        self.progress(1.0, "done")
        yield replace(known, missing=None)

    def no_answer(self, demand: Demand, missed: Missed | None = None) -> str:
        """That nothing meets the objective, and by how much the nearest misses."""
        every = [one for listed in self.replicas.values() for one in listed]
        near = missed.said if missed is not None else nearest_miss(self.pool or every, demand)
        return f"nothing in precision '{self.options.precisions[0]}' meets the objective; {near}"

    def _searched(self, known: Plan) -> list[Found]:
        options = self.options
        searches = [
            Searching(
                self.replicas[name],
                known.demand,
                options.objective,
                options.confirm if name == options.precisions[0] else min(options.confirm, 1),
                options.disaggregate,
            )
            for name in options.precisions
        ]
        return self.crowd.calls(searches, self.told(0.3, 0.5, "precisions searched"))

    def _with_answers(self, known: Plan, found: Sequence[Sequence[Deployed]]) -> Plan:
        firsts = dict(zip(self.options.precisions, (listed[0] if listed else None for listed in found), strict=True))
        best = firsts[self.options.precisions[0]]
        reason = None if best else known.reason
        return replace(known, best=best, confirmed=tuple(found[0]), options=firsts, reason=reason)

    def _compared(self, known: Plan, answer: Found, found: Sequence[Deployed]) -> list[Compared]:
        """The best of each device that was named, of both ways to serve."""
        options, pool = self.options, self.pool
        tasks = [
            Comparing(
                name,
                apart,
                tuple(one for one in pool if name in (None, one.hardware.name)),
                known.demand,
                options.objective,
                options.confirm > 0,
                answer.seen,
                self.reasons.get(name or "", "it cannot hold the model"),
            )
            for name in self.named
            for apart in ((False, True) if options.disaggregate and options.confirm else (False,))
        ]
        each = self.crowd.calls(tasks, self.told(0.5, 0.7, "devices and ways to serve compared"))
        return [one.with_known(answer.found, options.objective) for one in each]

    def _with_upper_ends(self, known: Plan, answers: Sequence[Found]) -> Plan:
        """With what holds at the upper end of its times first of what ranks alike, and what the answer takes there."""
        objective, disaggregate = self.options.objective, self.options.disaggregate
        slower = {
            one.key: Slower(one, objective, certainty_of(one.replica).relative_error)
            for answer in answers
            for one in answer.found
            if one.summary is not None
        }
        said_of = self.crowd.calls([*slower.values()], self.told(0.7, 0.75, "upper ends"))
        ends = dict(zip(slower, said_of, strict=True))
        compared = self._slower_compared(known)
        known = self._with_answers(known, [_holding_first(answer.found, ends, objective) for answer in answers])
        best, confirmed = known.best, known.confirmed
        if best is not None and best.key in ends and not ends[best.key].holds:
            holding = next((one for one in confirmed if ends[one.key].holds), None)
            growing = [Growing(slower[one.key], holding, disaggregate) for one in confirmed if not ends[one.key].holds]
            grown = [] if compared else self.crowd.calls(growing, self.told(0.8, 0.85, "upper ends"))
            enough = [one for one in (holding, safest(compared, objective), *grown) if one is not None]
            first = min(enough, key=lambda deployed: deployed.rank(objective), default=None)
            ends[best.key] = replace(ends[best.key], enough=first)
        return replace(known, upper_ends=ends, compared=tuple(compared))

    def _slower_compared(self, known: Plan) -> list[Compared]:
        """Each of the compared at the upper end of its times, and what of its kind holds there."""
        tasks = {
            at: HoldingSlower(
                one,
                tuple(replica for replica in self.pool if one.best.replica.hardware == replica.hardware),
                Slower(one.best, self.options.objective, certainty_of(one.best.replica).relative_error),
            )
            for at, one in enumerate(known.compared)
            if one.best is not None and one.best.summary is not None
        }
        held = self.crowd.calls([*tasks.values()], self.told(0.75, 0.85, "upper ends compared"))
        ends = dict(zip(tasks, held, strict=True))
        return [ends.get(at, one) for at, one in enumerate(known.compared)]

    def _changed(self, best: Deployed, seen: dict[Key, Summary]) -> list[Changed]:
        """The answers to changed inputs."""
        objective, apart = self.options.objective, self.options.disaggregate
        asked = [Asking(best, self.pool, objective, change, seen, apart) for change in changes_of(best.demand)]
        return self.crowd.calls(asked, self.told(0.85, 1.0, "inputs changed"))


def _runs(answers: Iterable[Found]) -> int:
    return sum(answer.runs for answer in answers)


def _holding_first(found: Sequence[Deployed], ends: Mapping[Key, UpperEnd], objective: Objective) -> list[Deployed]:
    """By rank; of those that rank alike the ones first that also hold at the upper end of their times."""

    def place(one: Deployed) -> tuple[float, ...]:
        end = ends.get(one.key)
        return (*one.rank(objective), float(end is None or not end.holds))

    return sorted(found, key=place)


def certainty_of(replica: ReplicaCurves) -> Certainty:
    """How far off a decode step of a replica at half its seats may be, and on what it rests."""
    model, setup = resolve_model(replica.scenario.model), replica.scenario.setup
    times = times_for(replica.hardware, setup.profile)
    return Certainty.of(model, setup, times, StepShape.decode(max(1.0, replica.seats / 2.0), replica.lengths.context))
