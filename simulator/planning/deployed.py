"""What is so many of a replica: what it costs, how it ranks, and the scenario of which the simulator serves it?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from membound.roofline.results.result import Summary
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.scenario.engine import DEFAULT_AGEING_S
from membound.simulator.busiest import ENOUGH_REQUESTS, at_its_busiest, requests_seen
from membound.simulator.planning.candidates import ReplicaCurves
from membound.simulator.planning.demand import Demand, Objective

# Requests of a simulated replica: enough for a 99th percentile.
FEWEST_REQUESTS = 600
# Of each client who thinks: they begin one after the other, and the engine is as busy as it gets when all have.
REQUESTS_OF_A_CLIENT = 5

# Which deployment it is, whatever it is asked for: its replica in words, how many, and engines for prompts.
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Deployed:
    """So many of a replica: screened with the tails that closed forms expect, and simulated where `summary` is there.

    The summary is that of one replica with its share of the load. With `prompt_engines` so many more replicas compute
    the prompts, the `replicas` only decode, and the summary is that of all.
    """

    replica: ReplicaCurves
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


def name_of(one: ReplicaCurves) -> str:
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
