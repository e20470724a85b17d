"""Which deployment ranks first of those that meet the objective in the simulator?

Closed forms say where to begin and what cannot rank high enough; every answer is one that was seen to hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.models.files import resolve_model
from membound.roofline.results.result import Summary
from membound.roofline.scenario import Scenario, Slo, parse_scenario
from membound.roofline.scenario.engine import DEFAULT_AGEING_S
from membound.roofline.scenario.workload import SessionPrompts
from membound.simulator.busiest import ENOUGH_REQUESTS, at_its_busiest, requests_seen
from membound.simulator.load import requests_beyond
from membound.simulator.planning.candidates import Demand, Replica
from membound.simulator.scheduling.request import Sequence as Served

Objective = Literal["cost", "devices"]
# Requests of a simulated replica: enough for a 99th percentile.
FEWEST_REQUESTS = 600
# Of each client who thinks: they begin one after the other, and the engine is as busy as it gets when all have.
REQUESTS_OF_A_CLIENT = 5
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
# Who is so many times too slow is not tried again at a load that differs by a tenth.
FAR = 1.5

# Which deployment it is, whatever it is asked for: its replica in words, how many, and engines for prompts.
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Deployed:
    """So many of a replica: screened with the tails that closed forms expect, and simulated where `summary` is there.

    The summary is that of one replica with its share of the load. With `prompt_engines` so many more replicas compute
    the prompts, the `replicas` only decode, and the summary is that of all.
    """

    replica: Replica
    replicas: int
    demand: Demand
    summary: Summary | None = None
    prompt_engines: int = 0

    @property
    def gpus(self) -> int:
        return (self.replicas + self.prompt_engines) * self.replica.devices

    @property
    def key(self) -> Key:
        return name_of(self.replica), self.replicas, self.prompt_engines

    @property
    def scenario(self) -> Scenario:
        """What the simulator serves: a replica with its share, or both pools with everything."""
        if not self.prompt_engines:
            return share_of(self.replica.scenario, self.replicas)
        pools = {"prefill_engines": self.prompt_engines, "decode_engines": self.replicas}
        return share_of(self.replica.scenario, 1).with_value("engine.disaggregation", pools)

    @property
    def usd_per_h(self) -> float | None:
        price = self.replica.hardware.price_usd_per_h
        return None if price is None else price * self.gpus

    @property
    def output_tokens_per_s(self) -> float:
        """Of all replicas, at the demand; over all of it where that has a busiest part."""
        return self.requests_per_s * self.demand.lengths.output_tokens

    @property
    def requests_per_s(self) -> float:
        if self.summary is not None and self.demand.rate_rps is None:
            return self.summary.requests_per_s * self.replicas
        if self.demand.rate_rps is not None:
            return self.demand.mean_rps or self.demand.rate_rps
        share = np.array([self.demand.amount / self.replicas])
        return float(self.replica.at(self.demand, share).requests_per_s[0]) * self.replicas

    @property
    def usd_per_million_tokens(self) -> float | None:
        return None if self.usd_per_h is None else self.usd_per_h / 3600.0 / self.output_tokens_per_s * 1e6

    @property
    def energy_j_per_token(self) -> float | None:
        """At the board power of its devices, which is the most that they draw."""
        power = self.replica.hardware.power_w
        return None if power is None else power * self.gpus / self.output_tokens_per_s

    def rank(self, objective: Objective) -> tuple[float, ...]:
        """Smaller is better; a device without a price comes after all that have one."""
        usd = math.inf if self.usd_per_h is None else self.usd_per_h
        return (usd, self.gpus) if objective == "cost" else (self.gpus, usd)


def name_of(one: Replica) -> str:
    degrees = one.parallel.degrees().items()
    divided = ", ".join(f"{degree} {value}" for degree, value in degrees if value > 1)
    return f"{one.devices} x {one.hardware.name} ({', '.join(filter(None, (divided, one.precision.name)))})"


def share_of(scenario: Scenario, replicas: int) -> Scenario:
    """What one of several replicas gets where each request goes to one of them by chance.

    Poisson arrivals stay Poisson; other arrivals keep their shape at a rate that much lower. A router that looks at the
    queues does better. Where the requests are a part of how arrivals vary, they are those around the busiest moment.
    """
    arrivals = denser(scenario, 1.0 / replicas)
    if "concurrency" in arrivals:
        arrivals["concurrency"] = max(1, math.ceil(arrivals["concurrency"] / replicas))
    requests = min(max(requests_seen(scenario.workload) // replicas, FEWEST_REQUESTS), ENOUGH_REQUESTS)
    if arrivals.get("think"):
        requests = max(requests, REQUESTS_OF_A_CLIENT * arrivals["concurrency"])
    workload = scenario.workload.model_dump(mode="json") | {"arrivals": arrivals, "requests": requests}
    return at_its_busiest(scenario.with_value("workload", workload))


def denser(scenario: Scenario, by: float) -> dict[str, Any]:
    """The scenario's arrivals `by` times as dense, of whatever kind."""
    arrivals = scenario.workload.arrivals.model_dump(mode="json")
    for key in ("rate_rps", "speed"):
        if key in arrivals:
            arrivals[key] *= by
    if "states" in arrivals:
        arrivals["states"] = [state | {"rate_rps": state["rate_rps"] * by} for state in arrivals["states"]]
    if "rates_rps" in arrivals:
        arrivals["rates_rps"] = [rate * by for rate in arrivals["rates_rps"]]
    return arrivals


def on_a_slower_clock(scenario: Scenario, by: float) -> Scenario:
    """The scenario as a clock sees it that is `by` times as slow.

    More arrives in a second of it, and all that lasts but the engine's own work lasts shorter: stays, periods,
    thoughts, deadlines and bounds.
    """
    document = scenario.model_dump(mode="json")
    workload, engine = document["workload"], document["engine"]
    arrivals = denser(scenario, by)
    if engine["order"] == "priority":
        engine["ageing_s"] = engine["ageing_s"] or DEFAULT_AGEING_S
    thinking = [part["think"] for part in (arrivals, workload["prompts"] or {}) if part.get("think")]
    lasting: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (arrivals, ("period_s", "peak_s", "part_s", *(() if arrivals["kind"] == "trace" else ("start_s",)))),
        *((state, ("dwell_s",)) for state in arrivals.get("states", ())),
        *((think, ("seconds", "mean_s", "median_s")) for think in thinking),
        *((one, ("ttft_s",)) for one in engine["classes"]),
        (engine, ("ageing_s",)),
        (document["slo"], ("ttft_s", "tpot_s", "e2e_s")),
    ]
    for part, names in lasting:
        part.update({name: part[name] / by for name in names if part.get(name) is not None})
    return parse_scenario(document | {"workload": workload | {"arrivals": arrivals}})


class Lateness:
    """Watches a run for first tokens that come FAR too late, until their 99th percentile surely does.

    It is `hopeless` then, whatever the rest of the run is like, and of a deployment that misses by far nothing else is
    asked than that it does. Requests of conversations are not counted before, so that they are served to the end.
    """

    def __init__(self, deployed: Deployed, scenario: Scenario) -> None:
        workload, bound_s = scenario.workload, deployed.demand.slo.ttft_s
        counted = workload.requests is not None and not isinstance(workload.prompts, SessionPrompts)
        self.allowed = 0.01 * (workload.requests or 0) + 1.0 if counted else math.inf
        self.bound_s = math.inf if bound_s is None else FAR * bound_s
        self.late = 0

    def __call__(self, sequence: Served) -> bool:
        first_s = sequence.first_token_s
        self.late += first_s is not None and first_s - sequence.request.arrival_s > self.bound_s
        return self.hopeless

    @property
    def hopeless(self) -> bool:
        return self.late > self.allowed


def simulate(deployed: Deployed, enough: Lateness | None = None) -> Summary:
    """One of the replicas with its share of the load, or both pools with all of it, served by the simulator."""
    from membound.simulator.run import run

    scenario = deployed.scenario
    return without_too_long(run(scenario, enough=enough).summary, scenario)


def without_too_long(summary: Summary, scenario: Scenario) -> Summary:
    """The summary without the requests that every engine refuses, as they are longer than the model's context."""
    if not summary.rejected:
        return summary
    too_long = requests_beyond(scenario.workload, resolve_model(scenario.model).max_context)
    too_long = min(too_long, summary.rejected)  # a run that was given up has not seen all
    kept = {"requests": summary.requests - too_long, "rejected": summary.rejected - too_long}
    return summary.model_copy(update=kept)


def simulate_while_hopeful(deployed: Deployed) -> tuple[Summary, bool]:
    """The same, and whether it was served to the end: pools of whose first tokens too many come far too late are not.

    A summary of less says, as that of all would, that it misses the objective FAR, and by first tokens.
    """
    lateness = Lateness(deployed, deployed.scenario)
    summary = simulate(deployed, lateness)
    return summary, not lateness.hopeless


def meets(summary: Summary, slo: Slo) -> bool:
    """Whether everybody was served, and the 99th percentiles are within the bounds."""
    if summary.rejected or not summary.completed:
        return False
    asked = ((summary.ttft_s, slo.ttft_s), (summary.tpot_s, slo.tpot_s), (summary.e2e_s, slo.e2e_s))
    return all(bound is None or value.p99 is None or value.p99 <= bound for value, bound in asked)


def excess(summary: Summary, slo: Slo) -> float:
    """How many times too slow the slowest of the bounded 99th percentiles is: at most 1 where all are met."""
    if summary.rejected or not summary.completed:
        return math.inf
    asked = ((summary.ttft_s, slo.ttft_s), (summary.tpot_s, slo.tpot_s), (summary.e2e_s, slo.e2e_s))
    return max((value.p99 / bound for value, bound in asked if bound is not None and value.p99 is not None), default=0)


@dataclass(frozen=True)
class Missed:
    """A simulated deployment that misses the objective: how many times too slow, and what it misses in words."""

    excess: float
    said: str

    @classmethod
    def of(cls, deployed: Deployed, summary: Summary, slo: Slo) -> Missed:
        name = f"nearest in the simulator is {name_of(deployed.replica)}, {deployed.gpus} devices in all"
        if summary.rejected:
            return cls(math.inf, f"{name}: it refuses {summary.rejected} of {summary.requests} requests as too long")
        asked = (("TTFT", summary.ttft_s, slo.ttft_s), ("TPOT", summary.tpot_s, slo.tpot_s))
        known = [
            (value.p99 / bound, f"p99 {metric} of {value.p99:.4g} s against {bound:.4g} s")
            for metric, value, bound in (*asked, ("end to end", summary.e2e_s, slo.e2e_s))
            if bound is not None and value.p99 is not None
        ]
        excess, said = max(known, default=(math.inf, "nothing was answered"))
        return cls(excess, f"{name}: {said}")


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

    def among(self, replicas: Sequence[Replica]) -> list[Deployed]:
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

    def among_pools(self, replicas: Sequence[Replica]) -> list[Deployed]:
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

    replicas: tuple[Replica, ...]
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


def search(task: Searching) -> Found:
    return task()


def screened_best(replicas: Iterable[Replica], demand: Demand, objective: Objective) -> Deployed | None:
    """What closed forms alone would answer."""
    possible = (
        Deployed(one, count, demand) for one in replicas if (count := one.replicas(demand, tails=True)) is not None
    )
    return min(possible, key=lambda deployed: deployed.rank(objective), default=None)
