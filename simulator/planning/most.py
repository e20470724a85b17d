"""What is the most that a deployment serves within its objective?"""

from __future__ import annotations

import math

from membound.roofline.errors import MemboundError
from membound.roofline.progress import Progress, silent
from membound.roofline.results.result import Summary
from membound.roofline.scenario import Scenario
from membound.simulator.busiest import at_its_busiest
from membound.simulator.planning.demand import demand_of
from membound.simulator.planning.deployed import denser
from membound.simulator.planning.verdict import meets, without_too_long


def max_rate(scenario: Scenario, *, tolerance: float = 0.03, progress: Progress = silent) -> tuple[float, Summary]:
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
        asked = at_its_busiest(plain.with_value("workload.arrivals", denser(plain, rate / start)))
        tried[rate] = without_too_long(run(asked).summary, asked)
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
