"""What does a plan have to serve, and how fast?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from membound.roofline.errors import MemboundError
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario, Slo
from membound.roofline.scenario.workload import ClosedLoop, TraceArrivals
from membound.simulator.busiest import ENOUGH_REQUESTS, busiest_of, requests_seen
from membound.simulator.load import MOST_ROWS, Lengths, arrival_rate, recorded_times_s, think_s

Objective = Literal["cost", "devices"]
# Devices without a price that a note names; the document has all.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Demand:
    """What is asked for: requests a second, or clients in a closed loop, who think for `think_s` between an answer and
    the next request; their lengths; and the objective.

    Where the rate is that of a `busiest` part, which is said in words, `mean_rps` is that of all.
    """

    rate_rps: float | None
    concurrency: float | None
    lengths: Lengths
    slo: Slo
    think_s: float = 0.0
    busiest: str | None = None
    mean_rps: float | None = None

    @property
    def amount(self) -> float:
        """Of the two the one that is given."""
        amount = self.rate_rps if self.rate_rps is not None else self.concurrency
        assert amount is not None
        return amount

    def denser(self, by: float) -> Demand:
        """With `by` times as many requests a second, or clients."""
        amounts = {name: getattr(self, name) for name in ("rate_rps", "mean_rps", "concurrency")}
        return replace(self, **{name: value * by for name, value in amounts.items() if value is not None})


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


def notes_of(
    scenario: Scenario, demand: Demand, unpriced: Sequence[str], objective: Objective, refused: float
) -> Iterator[str]:
    """What a reader would not expect of the plan of a demand."""
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
        few = len(unpriced) <= _MOST_NAMED
        yield f"no price is known for {', '.join(unpriced) if few else f'{len(unpriced)} devices'}{ranked}"
    if arrivals.kind not in ("poisson", "closed_loop"):
        yield "each replica is given the arrivals' shape at its share of the rate, as if a router chose by chance"
