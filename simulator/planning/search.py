"""Which deployment ranks first of those that meet the objective in the simulator?

Closed forms say where to begin and what cannot rank high enough; every answer is one that was seen to hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import Summary
from membound.simulator.planning.candidates import ReplicaCurves
from membound.simulator.planning.demand import Demand, Objective
from membound.simulator.planning.deployed import Deployed, Key
from membound.simulator.planning.verdict import FAR, Missed, excess, meets, simulate_while_hopeful

# Simulations of one precision's search at most.
MOST_RUNS = 40
MOST_POOL_RUNS = 12
# Simulations that look for another answer under a changed input at most, after what is known of the given one.
MOST_CHANGED_RUNS = 10
# Deployments that rank first alike of which so many are looked at, however few are wanted: which of them holds on a
# slower clock decides.
MOST_TIES = 3
# How many times the replicas that closed forms expect are tried at most.
MOST_BEYOND = 1.5


@dataclass
class Search:
    """Looks for the deployments that rank first and meet the objective in the simulator.

    `seen` are the summaries at this load. Those at a load near by (`elsewhere`) stand for who surely misses here too:
    who misses there where this demand is `harder`, who misses by far where it is easier. None ranks before `floor`.
    With `ties` who ranks as the first is looked at too, up to MOST_TIES of them.
    """

    demand: Demand
    objective: Objective
    wanted: int
    most_runs: int = MOST_RUNS
    most_pool_runs: int = MOST_POOL_RUNS
    seen: dict[Key, Summary] = field(default_factory=dict)
    elsewhere: dict[Key, Summary] = field(default_factory=dict)
    harder: bool = False
    floor: tuple[float, ...] | None = None
    ties: bool = False
    runs: int = 0
    hopeless: set[Key] = field(default_factory=set)
    nearest: Missed | None = None
    confirmed: list[Deployed] = field(default_factory=list)

    def among(self, replicas: Sequence[ReplicaCurves]) -> list[Deployed]:
        """The best `wanted`, the best first. A kind of replica is left out once even its fewest would rank lower."""
        bounds = []
        for one in replicas:
            fewest = one.replicas(self.demand, tails=False)
            if fewest is not None:
                bounds.append(Deployed(one, fewest, self.demand))
        bounds.sort(key=lambda deployed: deployed.rank(self.objective))
        for least in bounds:
            if self.runs >= self.most_runs or self._ranks_lower(least):
                break
            self._keep(self._fewest(self._not_before_floor(least)))
        return self._best()

    def among_pools(self, replicas: Sequence[ReplicaCurves]) -> list[Deployed]:
        """The same with prompts and outputs on engines of their own, beside what was found before."""
        waiting = []
        for one in replicas:
            pools = one.pools(self.demand) if one.hardware.scale_out is not None else None
            if pools is not None:
                waiting.append(Deployed(one, pools[1], self.demand, prompt_engines=pools[0]))
        for found in self._best_first(waiting, self.runs + self.most_pool_runs):
            self._keep(found)
        return self._best()

    def _best(self) -> list[Deployed]:
        alike = self._first_alike if self.ties and self.confirmed else 0
        return self.confirmed[: max(self.wanted, alike)]

    @property
    def _first_alike(self) -> int:
        """How many rank as the first does, of those that are looked at."""
        first = self.confirmed[0].rank(self.objective)
        return min(MOST_TIES, sum(one.rank(self.objective) == first for one in self.confirmed))

    def _keep(self, found: Deployed | None) -> None:
        if found is not None and not self._before_floor(found):
            self.confirmed.append(found)
            self.confirmed.sort(key=lambda deployed: deployed.rank(self.objective))

    def _before_floor(self, deployed: Deployed) -> bool:
        return self.floor is not None and deployed.rank(self.objective) < self.floor

    def _not_before_floor(self, least: Deployed) -> Deployed:
        """It, or the fewest of its replicas that do not rank before the floor."""
        while self._before_floor(least):
            least = replace(least, replicas=least.replicas + 1)
        return least

    def grown(self, least: Deployed, most_runs: int) -> Deployed | None:
        """From so many on until the objective is met: of two pools the one that holds it up gets another engine."""
        return next(self._best_first([least], most_runs), None)

    def _best_first(self, waiting: list[Deployed], most_runs: int) -> Iterator[Deployed]:
        """Those that meet the objective, as they are found.

        Whoever would rank first as it is now is simulated next, and gets another engine where it misses: what is
        cheap on paper only falls behind others as it grows.
        """
        while waiting and self.runs < most_runs:
            first = min(range(len(waiting)), key=lambda at: waiting[at].rank(self.objective))
            tried = self._tried(waiting.pop(first))
            if tried is None or tried.summary is None:
                continue
            if self._good(tried):
                yield tried
            elif not tried.summary.rejected:
                waiting.append(self._with_another_engine(tried))

    def _with_another_engine(self, tried: Deployed) -> Deployed:
        """One more engine for prompts where it is they that are late, else for outputs, or one more replica."""
        assert tried.summary is not None, "only what was simulated is judged"
        bound, late = self.demand.slo.ttft_s, tried.summary.ttft_s.p99
        if tried.prompt_engines and bound is not None and late is not None and late > bound:
            return replace(tried, prompt_engines=tried.prompt_engines + 1, summary=None)
        return replace(tried, replicas=tried.replicas + 1, summary=None)

    def _ranks_lower(self, deployed: Deployed) -> bool:
        if len(self.confirmed) < self.wanted:
            return False
        rank = deployed.rank(self.objective)
        if self.ties and rank == self.confirmed[0].rank(self.objective) and self._first_alike < MOST_TIES:
            return False
        return rank >= self.confirmed[self.wanted - 1].rank(self.objective)

    def _fewest(self, least: Deployed) -> Deployed | None:
        """The fewest replicas with which the simulator meets the objective, as long as they rank high enough.

        Closed forms say where to begin; from there it goes down while the objective is met, or up until it is.
        """
        expected = least.replica.replicas(self.demand, tails=True) or least.replicas
        begin = max(least.replicas, expected)
        while begin > least.replicas and self._ranks_lower(replace(least, replicas=begin)):
            begin -= 1
        first = self._tried(replace(least, replicas=begin))
        if first is None or first.summary is None:
            return None
        if first.summary.rejected:  # of a request that is too long there is no cure in numbers
            self._good(first)
            return None
        count, best = first.replicas, first if self._good(first) else None
        step = -1 if best else 1
        while self.runs < self.most_runs:
            count += step
            if count < 1 or self._before_floor(replace(least, replicas=count)):
                break
            if count > MOST_BEYOND * max(expected, least.replicas) + 1:
                break
            tried = self._tried(replace(least, replicas=count))
            if tried is None:
                break
            if self._good(tried):
                best = tried
                if step > 0:
                    break
            elif step < 0:
                break
        return best

    def _tried(self, deployed: Deployed) -> Deployed | None:
        """The deployment with its simulated summary; None where it would rank too low to matter, or cannot run."""
        if self._ranks_lower(deployed):
            return None
        summary = self._summary(deployed)
        return None if summary is None else replace(deployed, summary=summary)

    def _summary(self, deployed: Deployed) -> Summary | None:
        """What is known of it, else what the simulator says; None where it cannot run."""
        near = self.elsewhere.get(deployed.key)
        if near is not None and excess(near, self.demand.slo) > (1.0 if self.harder else FAR):
            return near
        if deployed.key not in self.seen:
            self.runs += 1
            try:
                self.seen[deployed.key], served = simulate_while_hopeful(deployed)
            except MemboundError:
                return None
            if not served:
                self.hopeless.add(deployed.key)
        return self.seen[deployed.key]

    def holds(self, deployed: Deployed) -> bool:
        """Whether the simulator says that it meets the objective."""
        tried = self._tried(deployed)
        return tried is not None and tried.summary is not None and self._good(tried)

    def _good(self, deployed: Deployed) -> bool:
        """Whether it meets the objective; where it does not, the nearest miss is kept."""
        assert deployed.summary is not None, "only what was simulated is judged"
        if meets(deployed.summary, self.demand.slo):
            return True
        missed = Missed.of(deployed, deployed.summary, self.demand.slo)
        if deployed.key in self.hopeless:
            missed = replace(missed, excess=math.inf)
        if self.nearest is None or missed.excess < self.nearest.excess:
            self.nearest = missed
        return False


@dataclass(frozen=True)
class Found:
    """What a search came to, and what it simulated."""

    found: list[Deployed]
    nearest: Missed | None
    runs: int
    seen: dict[Key, Summary] = field(default_factory=dict)


@dataclass(frozen=True)
class Searching:
    """What a worker does: the search in one precision; with nothing to confirm what closed forms say."""

    replicas: tuple[ReplicaCurves, ...]
    demand: Demand
    objective: Objective
    wanted: int
    disaggregate: bool

    def __call__(self) -> Found:
        if not self.wanted:
            only = screened_best(self.replicas, self.demand, self.objective)
            return Found([] if only is None else [only], None, 0)
        looking = Search(self.demand, self.objective, self.wanted, ties=True)
        found = looking.among(self.replicas)
        if self.disaggregate:
            found = looking.among_pools(self.replicas)
        return Found(found, looking.nearest, looking.runs, looking.seen)


def screened_best(replicas: Iterable[ReplicaCurves], demand: Demand, objective: Objective) -> Deployed | None:
    """What closed forms alone would answer."""
    possible = (
        Deployed(one, count, demand) for one in replicas if (count := one.replicas(demand, tails=True)) is not None
    )
    return min(possible, key=lambda deployed: deployed.rank(objective), default=None)
