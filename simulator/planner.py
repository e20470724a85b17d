"""Which deployment is the cheapest that meets the objective, and what lies on the front of speed against throughput?

Closed forms screen every device, precision and parallelism; the simulator then serves the workload on the few that
could be cheapest, with fewer replicas until the objective is missed, so that the answer is one that was seen to hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, catalog, get_hardware
from membound.roofline.result import Summary
from membound.roofline.scenario import Scenario, Slo
from membound.roofline.workload import ClosedLoop
from membound.simulator.candidates import Demand, Replica, replica_of, replicas_on
from membound.simulator.steady import Lengths, arrival_rate
from membound.simulator.sweep import Workers

Objective = Literal["cost", "devices"]
PRECISIONS = ("given", "8bit", "4bit")
# Requests of a simulated replica: enough for a 99th percentile.
FEWEST_REQUESTS = 600
MOST_REQUESTS = 4000
# Simulations of one precision's search at most.
MOST_RUNS = 60
MOST_POOL_RUNS = 16
PERTURBED = 0.1
Progress = Callable[[float, str], None]


def _silent(fraction: float, message: str) -> None:
    pass


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
        """Of all replicas, at the demand."""
        return self.requests_per_s * self.demand.lengths.output_tokens

    @property
    def requests_per_s(self) -> float:
        if self.summary is not None and self.demand.rate_rps is None:
            return self.summary.requests_per_s * self.replicas
        if self.demand.rate_rps is not None:
            return self.demand.rate_rps
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


@dataclass(frozen=True)
class FrontPoint:
    """A replica at a batch: what it does for a user, and what a device does for all."""

    replica: Replica
    batch: float
    user_tokens_per_s: float
    gpu_tokens_per_s: float
    ttft_s: float
    meets_slo: bool

    @property
    def usd_per_million_tokens(self) -> float | None:
        price = self.replica.hardware.price_usd_per_h
        return None if price is None else price / 3600.0 / self.gpu_tokens_per_s * 1e6


@dataclass(frozen=True)
class Sensitivity:
    """How far the most that a replica serves within the objective moves with each resource, and what would change.

    `elasticity` is the relative change for a relative change of 10 %: 1 where the resource alone decides.
    """

    elasticity: dict[str, float]
    screened_answer: str
    answer_changes: dict[str, str]

    @property
    def binds(self) -> str | None:
        """The resource that the answer depends on most."""
        best = max(self.elasticity, key=self.elasticity.__getitem__)
        return best if self.elasticity[best] > 0.01 else None


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


# --- what is asked for ---


def demand_of(scenario: Scenario) -> Demand:
    """The scenario's workload and objective; raises MemboundError where nothing is demanded of a latency."""
    slo = scenario.slo
    if slo.ttft_s is None and slo.tpot_s is None and slo.e2e_s is None:
        raise MemboundError("field 'slo' is empty; a plan needs a bound, such as slo={ttft_s: 1, tpot_s: 0.05}")
    rate = arrival_rate(scenario.workload)
    arrivals = scenario.workload.arrivals
    clients = float(arrivals.concurrency) if isinstance(arrivals, ClosedLoop) else None
    return Demand(rate, clients, Lengths.of(scenario.workload), slo)


def devices_of(scenario: Scenario, names: Sequence[str] | None) -> list[HardwareSpec]:
    """Those named, else those of the scenario's sweep, else every accelerator of the catalog."""
    if names is not None:
        return [get_hardware(name) for name in dict.fromkeys(names)]
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


def front_of(replicas: Iterable[Replica], slo: Slo) -> list[FrontPoint]:
    """Replicas at batches that no other beats in tokens a second of a user and of a device at once.

    Each in a closed loop that keeps the batch. Precisions have fronts of their own, since they differ in quality.
    """
    points: dict[str, list[FrontPoint]] = {}
    for one in replicas:
        load = one.at_concurrency(one.batches)
        good = load.meets(slo, tails=False)
        rate = load.requests_per_s * one.lengths.output_tokens / one.devices
        for index, batch in enumerate(one.batches):
            user = 1.0 / float(load.tpot_s[index])
            at = FrontPoint(one, float(batch), user, float(rate[index]), float(load.ttft_s[index]), bool(good[index]))
            points.setdefault(one.precision.name, []).append(at)
    return [point for listed in points.values() for point in pareto(listed)]


def pareto(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Those that no other point equals or exceeds in both rates, by falling rate of a user."""
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda point: (-point.user_tokens_per_s, -point.gpu_tokens_per_s)):
        if not front or point.gpu_tokens_per_s > front[-1].gpu_tokens_per_s:
            front.append(point)
    return front


def nearest_miss(replicas: Sequence[Replica], demand: Demand) -> str:
    """Which replica comes closest to the objective under the lightest load, in one sentence."""

    def excess(one: Replica) -> tuple[float, str]:
        lightest = np.array([one.most_rps / 1000.0 if demand.rate_rps is not None else 1.0])
        load, slo = one.at(demand, lightest), demand.slo
        asked = [
            ("p99 TTFT", float(load.ttft_p99_s[0]), slo.ttft_s),
            ("p99 TPOT", float(load.tpot_p99_s[0]), slo.tpot_s),
            ("p99 end to end", float(load.e2e_p99_s[0]), slo.e2e_s),
        ]
        name, value, bound = max((a for a in asked if a[2] is not None), key=lambda a: a[1] / (a[2] or 1.0))
        assert bound is not None
        return value / bound, f"{name} of {value:.4g} s against {bound:.4g} s"

    misses = [(excess(one), one) for one in replicas]
    (_, said), one = min(misses, key=lambda miss: miss[0][0])
    return f"nearest is {_name_of(one)} with one request at a time: {said}"


def _name_of(one: Replica) -> str:
    divided = ", ".join(
        f"{degree} {value}" for degree, value in one.parallel.model_dump().items() if value > 1 and degree != "cp"
    )
    return f"{one.devices} x {one.hardware.name} ({', '.join(filter(None, (divided, one.precision.name)))})"


# --- the simulator's word ---


def share_of(scenario: Scenario, replicas: int) -> Scenario:
    """What one of several replicas gets where each request goes to one of them by chance.

    Poisson arrivals stay Poisson; other arrivals keep their shape at a rate that much lower. A router that looks at the
    queues does better.
    """
    arrivals = _denser(scenario, 1.0 / replicas)
    if "concurrency" in arrivals:
        arrivals["concurrency"] = max(1, math.ceil(arrivals["concurrency"] / replicas))
    asked = scenario.workload.requests
    requests = None if asked is None else min(max(asked // replicas, FEWEST_REQUESTS), MOST_REQUESTS)
    workload = scenario.workload.model_dump(mode="json") | {"arrivals": arrivals, "requests": requests}
    return scenario.with_value("workload", workload)


def _denser(scenario: Scenario, by: float) -> dict[str, Any]:
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


def simulate(deployed: Deployed) -> Summary:
    """One of the replicas with its share of the load, or both pools with all of it, served by the simulator."""
    from membound.simulator.run import run

    return run(deployed.scenario).summary


def meets(summary: Summary, slo: Slo) -> bool:
    """Whether everybody was served, and the 99th percentiles are within the bounds."""
    if summary.rejected or not summary.completed:
        return False
    asked = ((summary.ttft_s, slo.ttft_s), (summary.tpot_s, slo.tpot_s), (summary.e2e_s, slo.e2e_s))
    return all(bound is None or value.p99 is None or value.p99 <= bound for value, bound in asked)


@dataclass
class _Search:
    """Looks for the deployments that rank first and meet the objective in the simulator."""

    demand: Demand
    objective: Objective
    wanted: int
    runs: int = 0
    confirmed: list[Deployed] = field(default_factory=list)

    def among(self, replicas: Sequence[Replica], progress: Progress) -> list[Deployed]:
        """The best `wanted`, the best first. A kind of replica is left out once even its fewest would rank lower."""
        bounds = []
        for one in replicas:
            fewest = one.replicas(self.demand, tails=False)
            if fewest is not None:
                bounds.append(Deployed(one, fewest, self.demand))
        bounds.sort(key=lambda deployed: deployed.rank(self.objective))
        for index, least in enumerate(bounds):
            if self.runs >= MOST_RUNS or self._ranks_lower(least):
                break
            progress(index / len(bounds), f"simulating {_name_of(least.replica)}")
            self._keep(self._fewest(least))
        return self.confirmed[: self.wanted]

    def among_pools(self, replicas: Sequence[Replica], progress: Progress) -> list[Deployed]:
        """The same with prompts and outputs on engines of their own, beside what was found before."""
        bounds = []
        for one in replicas:
            pools = one.pools(self.demand) if one.hardware.scale_out is not None else None
            if pools is not None:
                bounds.append(Deployed(one, pools[1], self.demand, prompt_engines=pools[0]))
        bounds.sort(key=lambda deployed: deployed.rank(self.objective))
        most_runs = self.runs + MOST_POOL_RUNS
        for index, tried in enumerate(bounds):
            if self.runs >= most_runs or self._ranks_lower(tried):
                break
            progress(index / len(bounds), f"simulating pools of {_name_of(tried.replica)}")
            self._keep(self._balanced(tried, most_runs))
        return self.confirmed[: self.wanted]

    def _keep(self, found: Deployed | None) -> None:
        if found is not None:
            self.confirmed.append(found)
            self.confirmed.sort(key=lambda deployed: deployed.rank(self.objective))

    def _balanced(self, least: Deployed, most_runs: int) -> Deployed | None:
        """Both pools from their fewest on: the one that holds the objective up gets another engine."""
        slo, deployed = self.demand.slo, least
        while self.runs < most_runs:
            tried = self._tried(deployed)
            if tried is None or tried.summary is None:
                return None
            if self._good(tried):
                return tried
            late = tried.summary.ttft_s.p99
            prompts_hold_up = slo.ttft_s is not None and late is not None and late > slo.ttft_s
            if prompts_hold_up:
                deployed = replace(deployed, prompt_engines=deployed.prompt_engines + 1)
            else:
                deployed = replace(deployed, replicas=deployed.replicas + 1)
        return None

    def _ranks_lower(self, deployed: Deployed) -> bool:
        if len(self.confirmed) < self.wanted:
            return False
        return deployed.rank(self.objective) >= self.confirmed[self.wanted - 1].rank(self.objective)

    def _fewest(self, least: Deployed) -> Deployed | None:
        """The fewest replicas with which the simulator meets the objective, as long as they rank high enough.

        Closed forms say where to begin; from there it goes down while the objective is met, or up until it is.
        """
        expected = least.replica.replicas(self.demand, tails=True) or least.replicas
        begin = max(least.replicas, expected)
        while begin > least.replicas and self._ranks_lower(replace(least, replicas=begin)):
            begin -= 1
        first = self._tried(replace(least, replicas=begin))
        if first is None:
            return None
        count, best = first.replicas, first if self._good(first) else None
        step = -1 if best else 1
        while self.runs < MOST_RUNS:
            count += step
            if count < 1 or count > 2 * max(expected, least.replicas):
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
        self.runs += 1
        try:
            return replace(deployed, summary=simulate(deployed))
        except MemboundError:
            return None

    def _good(self, deployed: Deployed) -> bool:
        return deployed.summary is not None and meets(deployed.summary, self.demand.slo)


# --- sensitivity ---

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


def sensitivity_of(best: Deployed, replicas: Sequence[Replica], objective: Objective) -> Sensitivity:
    """What the best deployment's rate depends on, and which inputs would change the answer of the closed forms."""
    replica, demand = best.replica, best.demand
    before = _most(best, replica)
    elasticity = {}
    for name, scaled in _RESOURCES.items():
        changed = _rebuilt(replica, scaled(replica.hardware, 1.0 + PERTURBED))
        after = _most(best, changed)
        elasticity[name] = (after / before - 1.0) / PERTURBED if before > 0 else 0.0
    answer = _screened_best(replicas, demand, objective)
    changes = {}
    for name, changed_demand in _perturbed(demand):
        other = _screened_best(replicas, changed_demand, objective)
        if _place(other) != _place(answer):
            changes[name] = _said(other)
    return Sensitivity(elasticity, _said(answer), changes)


def _most(deployed: Deployed, replica: Replica) -> float:
    """The most load that the deployment serves within the objective if this is its replica."""
    demand, prompts = deployed.demand, deployed.prompt_engines
    if prompts:
        return replica.most_of_pools(demand, prompts, deployed.replicas)
    return replica.most_load(demand, tails=True) or replica.most_load(demand, tails=False)


def _said(deployed: Deployed | None) -> str:
    return "nothing" if deployed is None else f"{deployed.gpus} x {deployed.replica.hardware.name}"


def _rebuilt(replica: Replica, hardware: HardwareSpec) -> Replica:
    return replica_of(replica.scenario, hardware, replica.precision, replica.parallel, replica.lengths)


def _perturbed(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """The demand with each of its inputs a tenth higher and lower."""
    for sign, by in (("+10 %", 1.0 + PERTURBED), ("-10 %", 1.0 - PERTURBED)):
        if demand.rate_rps is not None:
            yield f"rate {sign}", replace(demand, rate_rps=demand.rate_rps * by)
        if demand.concurrency is not None:
            yield f"concurrency {sign}", replace(demand, concurrency=demand.concurrency * by)
        for bound in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(demand.slo, bound)
            if value is not None:
                slo = demand.slo.model_copy(update={bound: value * by})
                yield f"slo.{bound} {sign}", replace(demand, slo=slo)


def _screened_best(replicas: Iterable[Replica], demand: Demand, objective: Objective) -> Deployed | None:
    """What closed forms alone would answer."""
    possible = (
        Deployed(one, count, demand) for one in replicas if (count := one.replicas(demand, tails=True)) is not None
    )
    return min(possible, key=lambda deployed: deployed.rank(objective), default=None)


def _place(deployed: Deployed | None) -> tuple[str, int] | None:
    return None if deployed is None else (deployed.replica.hardware.name, deployed.gpus)


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
    demand, specs = demand_of(scenario), devices_of(scenario, devices)
    if len(set(precisions)) < len(precisions) or not precisions:
        raise MemboundError("--precision needs names that differ; give some of given, 8bit, 4bit")
    plain = scenario.model_copy(update={"sweep": ()})
    tasks = [_Screening(plain, spec, tuple(precisions), demand.lengths) for spec in specs]
    crowd = workers or Workers("loky" if len(tasks) > 16 else "sequential")
    found = crowd.map(_screen, tasks, lambda done, message: progress(done * 0.5, f"devices screened: {message}"))
    replicas = [replica for listed, _ in found for replica in listed]
    reasons = [reason for _, listed in found for reason in listed]
    unpriced = tuple(spec.name for spec in specs if spec.price is None)
    if not replicas:
        raise MemboundError(f"no device can hold the model: {reasons[0] if reasons else 'none is given'}")

    options: dict[str, Deployed | None] = {}
    confirmed: list[Deployed] = []
    runs = 0
    for index, name in enumerate(precisions):

        def tell(fraction: float, message: str, index: int = index) -> None:
            progress(0.5 + 0.5 * (index + fraction) / len(precisions), message)

        pool = [one for one in replicas if one.precision.name == name]
        if confirm:
            search = _Search(demand, objective, confirm if index == 0 else 1)
            listed = search.among(pool, tell)
            if disaggregate:
                listed = search.among_pools(pool, tell)
            runs += search.runs
        else:
            only = _screened_best(pool, demand, objective)
            listed = [] if only is None else [only]
        options[name] = listed[0] if listed else None
        confirmed += listed if index == 0 else []
    progress(1.0, "done")
    best = options[precisions[0]]
    pool = [one for one in replicas if one.precision.name == precisions[0]]
    reason = None
    if best is None:
        reason = f"nothing in precision '{precisions[0]}' meets the objective; {nearest_miss(pool or replicas, demand)}"
    return Plan(
        plain,
        demand,
        objective,
        best,
        tuple(confirmed),
        options,
        tuple(front_of(replicas, demand.slo)),
        None if best is None else sensitivity_of(best, pool, objective),
        len(replicas),
        runs,
        unpriced,
        reason,
        tuple(_notes(scenario, unpriced, objective)),
    )


def _notes(scenario: Scenario, unpriced: Sequence[str], objective: Objective) -> Iterator[str]:
    if unpriced:
        ranked = "; they rank after all that have one" if objective == "cost" else ""
        yield f"no price is known for {', '.join(unpriced)}{ranked}"
    if scenario.workload.arrivals.kind not in ("poisson", "closed_loop"):
        yield "each replica is given the arrivals' shape at its share of the rate, as if a router chose by chance"


# --- the most that a deployment serves ---


def max_rate(scenario: Scenario, *, tolerance: float = 0.03, progress: Progress = _silent) -> tuple[float, Summary]:
    """The largest rate at which the scenario's own deployment meets its objective in the simulator, by bracketing.

    Raises MemboundError where even the lowest rate misses it.
    """
    from membound.simulator.run import run

    demand = demand_of(scenario)
    if demand.rate_rps is None:
        raise MemboundError("a largest rate needs open arrivals; give workload.arrivals={kind: poisson, rate_rps: 1}")
    start = demand.rate_rps
    plain = scenario.model_copy(update={"sweep": ()})
    tried: dict[float, Summary] = {}

    def good(rate: float) -> bool:
        progress(min(0.95, len(tried) / 20.0), f"{rate:.3g} requests/s")
        tried[rate] = run(plain.with_value("workload.arrivals", _denser(plain, rate / start))).summary
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
        "best": _deployed_json(found.best),
        "reason": found.reason,
        "front": [_front_json(point) for point in found.front],
        "confirmed": [_deployed_json(one) for one in found.confirmed],
        "options": {name: _deployed_json(one) for name, one in found.options.items()},
        "sensitivity": None
        if found.sensitivity is None
        else {
            "binds": found.sensitivity.binds,
            "elasticity": found.sensitivity.elasticity,
            "screened_answer": found.sensitivity.screened_answer,
            "answer_changes": found.sensitivity.answer_changes,
        },
        "demand": {
            "model": found.scenario.model,
            "rate_rps": demand.rate_rps,
            "concurrency": demand.concurrency,
            "prompt_tokens": demand.lengths.prompt_tokens,
            "output_tokens": demand.lengths.output_tokens,
            "slo": demand.slo.model_dump(),
        },
        "objective": found.objective,
        "screened": found.screened,
        "simulated": found.simulated,
        "unpriced": list(found.unpriced),
        "notes": list(found.notes),
    }


def _parts(replica: Replica, engines: int = 1) -> dict[str, Any]:
    scenario = replica.scenario
    return {
        "precision": replica.precision.name,
        "lossless": replica.precision.lossless,
        "techniques": [technique.model_dump(mode="json") for technique in scenario.techniques],
        "parallel": replica.parallel.model_dump(),
        "gpus_per_replica": replica.devices * engines,
        "max_num_seqs": scenario.engine.max_num_seqs,
        "max_batched_tokens": scenario.engine.max_batched_tokens,
    }


def _deployed_json(deployed: Deployed | None) -> dict[str, Any] | None:
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
