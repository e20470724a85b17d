"""What is the best of each device, with prompts and outputs on the same engines and on engines of their own?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from membound.roofline.results.result import Summary
from membound.simulator.planning.candidates import ReplicaCurves
from membound.simulator.planning.demand import Demand, Objective
from membound.simulator.planning.deployed import Deployed, Key, on_a_slower_clock
from membound.simulator.planning.search import MOST_CHANGED_RUNS, MOST_POOL_RUNS, Search, screened_best
from membound.simulator.planning.sensitivity import Slower, UpperEnd


@dataclass(frozen=True)
class Compared:
    """The deployment that ranks first of a device (None: of all), with `apart` of those whose prompts and outputs have
    engines of their own; where there is none, `reason` says why."""

    device: str | None
    apart: bool
    best: Deployed | None
    reason: str | None = None
    end: UpperEnd | None = None

    @property
    def safe(self) -> Deployed | None:
        """What meets the objective also at the upper end of its times; None where none does, or nobody looked."""
        if self.end is None:
            return None
        return self.best if self.end.holds else self.end.enough

    def with_known(self, known: Iterable[Deployed], objective: Objective) -> Compared:
        """The same where other searches have seen one of its kind that ranks higher."""
        alike = [one for one in known if bool(one.prompt_engines) == self.apart and self.is_of(one.replica)]
        if self.best is not None:
            alike.append(self.best)
        first = min(alike, key=lambda one: one.rank(objective), default=None)
        return self if first is None else replace(self, best=first, reason=None)

    def is_of(self, replica: ReplicaCurves) -> bool:
        return self.device in (None, replica.hardware.name)


@dataclass(frozen=True)
class Comparing:
    """What a worker does: the search for one of them; closed forms, which know no pools, where nothing is simulated."""

    device: str | None
    apart: bool
    replicas: tuple[ReplicaCurves, ...]
    demand: Demand
    objective: Objective
    simulates: bool
    seen: dict[Key, Summary]
    reason: str

    def __call__(self) -> Compared:
        if not self.replicas:
            return Compared(self.device, self.apart, None, self.reason)
        if not self.simulates:
            best = screened_best(self.replicas, self.demand, self.objective)
            said = None if best else "by closed forms no number of them meets the objective"
            return Compared(self.device, self.apart, best, said)
        looking = Search(self.demand, self.objective, 1, seen=dict(self.seen))
        found = (looking.among_pools if self.apart else looking.among)(self.replicas)
        if found:
            return Compared(self.device, self.apart, found[0])
        missed = looking.nearest.said if looking.nearest else "no engine comes near the objective"
        return Compared(self.device, self.apart, None, missed)


@dataclass(frozen=True)
class HoldingSlower:
    """What a worker does: whether one of them holds at the upper end of its times, and what of its kind does."""

    compared: Compared
    replicas: tuple[ReplicaCurves, ...]
    slower: Slower

    def __call__(self) -> Compared:
        end = self.slower()
        if end.holds:
            return replace(self.compared, end=end)
        by, asked = 1.0 + self.slower.error, self.slower.asked
        slow = [replace(one, scenario=on_a_slower_clock(one.scenario, by)) for one in self.replicas]
        looking = Search(asked.demand, self.slower.objective, 1, MOST_CHANGED_RUNS, MOST_POOL_RUNS)
        found = (looking.among_pools if self.compared.apart else looking.among)(slow)
        return replace(self.compared, end=replace(end, enough=found[0] if found else None))


def safest(compared: Sequence[Compared], objective: Objective) -> Deployed | None:
    """What ranks first of all that meet the objective at the upper end of their times."""
    safe = [one.safe for one in compared if one.safe is not None]
    return min(safe, key=lambda deployed: deployed.rank(objective), default=None)
