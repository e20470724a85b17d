"""What is the front of a user's tokens a second against a device's, and what comes nearest to an objective?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from membound.roofline.scenario import Slo
from membound.simulator.planning.candidates import ReplicaCurves
from membound.simulator.planning.demand import Demand
from membound.simulator.planning.deployed import name_of


@dataclass(frozen=True)
class FrontPoint:
    """A replica at a batch: what it does for a user, and what a device does for all."""

    replica: ReplicaCurves
    batch: float
    user_tokens_per_s: float
    gpu_tokens_per_s: float
    ttft_s: float
    meets_slo: bool

    @property
    def usd_per_million_tokens(self) -> float | None:
        price = self.replica.hardware.price_usd_per_h
        return None if price is None else price / 3600.0 / self.gpu_tokens_per_s * 1e6


def front_of(replicas: Iterable[ReplicaCurves], slo: Slo) -> list[FrontPoint]:
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


def nearest_miss(replicas: Sequence[ReplicaCurves], demand: Demand) -> str:
    """Which replica comes closest to the objective under the lightest load, in one sentence."""

    def excess(one: ReplicaCurves) -> tuple[float, str]:
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
    return f"nearest is {name_of(one)} with one request at a time: {said}"
