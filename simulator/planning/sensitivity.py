"""What does a deployment's rate depend on, and which inputs would change the answer?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from membound.roofline.hardware import HardwareSpec
from membound.roofline.results.result import Summary
from membound.simulator.planning.candidates import ReplicaCurves, replica_of
from membound.simulator.planning.demand import Demand, Objective
from membound.simulator.planning.deployed import Deployed, Key, denser, on_a_slower_clock
from membound.simulator.planning.search import MOST_CHANGED_RUNS, Search, screened_best

# By how much resources and inputs are changed.
PERTURBED = 0.1


@dataclass(frozen=True)
class Sensitivity:
    """How far the most that a replica serves within the objective moves with each resource, and what would change.

    `elasticity` is the relative change for a relative change of 10 %: 1 where the resource alone decides.
    `answer_changes` says by which other answer a changed input is met, found the way that the answer itself was.
    """

    elasticity: dict[str, float]
    screened_answer: str
    changed: tuple[Changed, ...]

    @property
    def answer_changes(self) -> dict[str, str]:
        return {one.name: one.said for one in self.changed if one.changes}

    @property
    def binds(self) -> str | None:
        """The resource that the answer depends on most."""
        best = max(self.elasticity, key=self.elasticity.__getitem__)
        return best if self.elasticity[best] > 0.01 else None


@dataclass(frozen=True)
class Changed:
    """The answer under one changed input, None where none was found among those tried; `given` is the answer to the
    input as it is. The answer to a smaller demand never ranks below it, that to a larger one never before it."""

    name: str
    easier: bool
    given: Deployed
    answer: Deployed | None
    runs: int = 0

    @property
    def changes(self) -> bool:
        return self.answer is None or _place(self.answer) != _place(self.given)

    @property
    def said(self) -> str:
        if self.answer is not None:
            return _said(self.answer)
        return f"{_said(self.given)} misses it, and none of the {self.runs} simulated meets it"


_RESOURCES: dict[str, Callable[[HardwareSpec, float], HardwareSpec]] = {
    "memory": lambda spec, by: spec.model_copy(update={"memory_bytes": int(spec.memory_bytes * by)}),
    "bandwidth": lambda spec, by: spec.model_copy(update={"bandwidth_bytes_per_s": spec.bandwidth_bytes_per_s * by}),
    "compute": lambda spec, by: spec.model_copy(
        update={
            "matrix_flops": {dtype: rate * by for dtype, rate in spec.matrix_flops.items()},
            "sparse_flops": {dtype: rate * by for dtype, rate in spec.sparse_flops.items()},
        }
    ),
    "link": lambda spec, by: spec.model_copy(
        update={
            name: link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * by})
            for name in ("scale_up", "scale_out")
            if (link := getattr(spec, name)) is not None
        }
    ),
}


def sensitivity_of(
    best: Deployed,
    screened: Deployed | None,
    changed: Sequence[Changed],
) -> Sensitivity:
    """What the best deployment's rate depends on, beside what closed forms would answer, and changed inputs."""
    replica = best.replica
    before = _most(best, replica)
    elasticity = {}
    for name, scaled in _RESOURCES.items():
        after = _most(best, _rebuilt(replica, scaled(replica.hardware, 1.0 + PERTURBED)))
        # below nothing is the error of curves that are straight between two batches
        elasticity[name] = max(0.0, (after / before - 1.0) / PERTURBED) if before > 0 else 0.0
    return Sensitivity(elasticity, _said(screened), tuple(changed))


# --- under a changed input ---


@dataclass(frozen=True)
class Asking:
    """What a worker does: the search for the answer under one changed input, by the method that gave the answer.

    The answer's own deployment comes first: a smaller demand it meets, so that only what ranks before it is looked at;
    of a larger one it is simulated, and where it misses, what ranks after it is looked at.
    """

    best: Deployed
    replicas: tuple[ReplicaCurves, ...]
    objective: Objective
    change: Change
    seen: dict[Key, Summary]
    disaggregate: bool

    def __call__(self) -> Changed:
        change, best = self.change, self.change.of(self.best)
        replicas = [change.of_replica(one) for one in self.replicas]
        if self.best.summary is None:
            found = screened_best(replicas, change.demand, self.objective)
            return Changed(change.name, change.easier, self.best, found)
        seen, elsewhere = (dict(self.seen), {}) if change.load_by == 1.0 else ({}, dict(self.seen))
        looking = Search(
            change.demand,
            self.objective,
            1,
            MOST_CHANGED_RUNS,
            MOST_CHANGED_RUNS // 2,
            seen,
            elsewhere,
            harder=not change.easier,
            floor=None if change.easier else best.rank(self.objective),
        )
        if change.easier or looking.holds(best):
            looking.confirmed = [best]
        if change.easier or not looking.confirmed:
            looking.among(replicas)
            if self.disaggregate:
                looking.among_pools(replicas)
        answer = looking.confirmed[0] if looking.confirmed else None
        return Changed(change.name, change.easier, self.best, answer, looking.runs)


@dataclass(frozen=True)
class Change:
    """A demand with one input changed; arrivals are `load_by` times as dense, or clients as many."""

    name: str
    demand: Demand
    load_by: float
    easier: bool

    def of_replica(self, replica: ReplicaCurves) -> ReplicaCurves:
        if self.load_by == 1.0:
            return replica
        arrivals = denser(replica.scenario, self.load_by)
        if "concurrency" in arrivals:
            arrivals["concurrency"] = max(1, round(arrivals["concurrency"] * self.load_by))
        return replace(replica, scenario=replica.scenario.with_value("workload.arrivals", arrivals))

    def of(self, deployed: Deployed) -> Deployed:
        return replace(deployed, replica=self.of_replica(deployed.replica), demand=self.demand, summary=None)


def changes_of(demand: Demand) -> Iterator[Change]:
    """The demand with each of its inputs a tenth higher and lower."""
    for sign, by in (("+10 %", 1.0 + PERTURBED), ("-10 %", 1.0 - PERTURBED)):
        name = "rate" if demand.rate_rps is not None else "concurrency"
        yield Change(f"{name} {sign}", demand.denser(by), by, easier=by < 1.0)
        for bound in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(demand.slo, bound)
            if value is not None:
                slo = demand.slo.model_copy(update={bound: value * by})
                yield Change(f"slo.{bound} {sign}", replace(demand, slo=slo), 1.0, easier=by > 1.0)


# --- at the upper end of the interval ---


@dataclass(frozen=True)
class UpperEnd:
    """Whether a deployment meets the objective where every step takes as long as its interval allows (`error` more).

    Of the answer, `enough` ranks first of all that were tried and do; None where it holds itself, or none does.
    """

    error: float
    holds: bool
    enough: Deployed | None = None


@dataclass(frozen=True)
class Slower:
    """What a worker does: the same with all times longer by the device's interval.

    A run whose every step is s times as long is the same run with s times the rate, and with all else that lasts so
    much shorter, seen on a clock that is s times as slow: the simulator needs no other times to be asked about it.
    """

    deployed: Deployed
    objective: Objective
    error: float

    def __call__(self) -> UpperEnd:
        asked = self.asked
        return UpperEnd(self.error, Search(asked.demand, self.objective, 1, MOST_CHANGED_RUNS).holds(asked))

    @property
    def asked(self) -> Deployed:
        """The deployment and its demand on the slower clock."""
        by, demand, replica = 1.0 + self.error, self.deployed.demand, self.deployed.replica
        bounds = {name: value and value / by for name, value in demand.slo.model_dump().items()}
        slo = demand.slo.model_copy(update=bounds)
        denser = demand if demand.rate_rps is None else demand.denser(by)
        slower = replace(denser, slo=slo, think_s=demand.think_s / by)
        scenario = on_a_slower_clock(replica.scenario, by)
        return replace(self.deployed, replica=replace(replica, scenario=scenario), demand=slower, summary=None)


@dataclass(frozen=True)
class Growing:
    """What a worker does: more of a deployment that misses at the upper end, or pools of its replica, until one meets
    the objective there; None where none does that ranks before `known`, which is seen to."""

    slower: Slower
    known: Deployed | None
    disaggregate: bool

    def __call__(self) -> Deployed | None:
        asked = self.slower.asked
        looking = Search(asked.demand, self.slower.objective, 1, MOST_CHANGED_RUNS, MOST_CHANGED_RUNS // 2)
        looking.confirmed = [] if self.known is None else [self.known]
        more = looking.grown(asked, MOST_CHANGED_RUNS)
        if more is not None:
            looking.confirmed = [more]
        if self.disaggregate and not asked.prompt_engines:
            looking.among_pools([asked.replica])
        first = looking.confirmed[0] if looking.confirmed else None
        return None if first is self.known else first


# --- closed forms of what binds ---


def _most(deployed: Deployed, replica: ReplicaCurves) -> float:
    """The most load that the deployment serves within the objective if this is its replica."""
    demand, prompts = deployed.demand, deployed.prompt_engines
    if prompts:
        return replica.most_of_pools(demand, prompts, deployed.replicas)
    return replica.most_load(demand, tails=True) or replica.most_load(demand, tails=False)


def _said(deployed: Deployed | None) -> str:
    return "nothing" if deployed is None else f"{deployed.gpus} x {deployed.replica.hardware.name}"


def _rebuilt(replica: ReplicaCurves, hardware: HardwareSpec) -> ReplicaCurves:
    return replica_of(replica.scenario, hardware, replica.precision, replica.parallel, replica.lengths)


def _place(deployed: Deployed | None) -> tuple[str, int] | None:
    return None if deployed is None else (deployed.replica.hardware.name, deployed.gpus)
