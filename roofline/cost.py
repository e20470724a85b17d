"""How long does a step take, what binds it, and how sure is that?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from membound.roofline.models import ModelSpec
from membound.roofline.operator_time import OperatorTime, Times
from membound.roofline.operators import Operator
from membound.roofline.result import BOUNDS
from membound.roofline.shape import Count, StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup


@dataclass(frozen=True)
class OperatorCost:
    """An operator with its time; `bound` is the roof that asks most of it."""

    operator: Operator
    time: OperatorTime

    @property
    def total_s(self) -> Count:
        return self.time.time_s * self.operator.calls

    @property
    def bound(self) -> str:
        """memory_weights, memory_kv, compute, link or overhead; of a step's scalars only."""
        return next(bound for bound, seconds in self.seconds_by_bound().items() if np.all(seconds == self.total_s))

    def seconds_by_bound(self) -> dict[str, Count]:
        """All calls' seconds under the bound that holds, 0 under the others (elementwise for arrays)."""
        op, time = self.operator, self.time
        memory = "memory_kv" if op.kind in ("attention", "recurrent") else "memory_weights"
        asked = {"overhead": time.overhead_s, "link": time.link_s, "compute": time.compute_s, memory: time.memory_s}
        total = self.total_s
        if np.ndim(sum(asked.values())) == 0 == np.ndim(total):
            return dict.fromkeys(asked, 0.0) | {max(asked, key=asked.__getitem__): total}
        most = np.maximum(np.maximum(time.memory_s, time.overhead_s), np.maximum(time.compute_s, time.link_s))
        left: Any = np.ones_like(most, dtype=bool)
        seconds: dict[str, Count] = {}
        for bound, seconds_asked in asked.items():
            holds = left & (seconds_asked >= most)
            seconds[bound] = np.where(holds, total, 0.0)
            left = left & ~holds
        return seconds


@dataclass(frozen=True)
class StepCost:
    """A step's (or many steps') time in seconds with its operators and its interval."""

    operators: tuple[OperatorCost, ...]
    times: Times

    @cached_property
    def relative_error(self) -> float:
        """How far off the time may be: as far as steps were found to be, or as far as the kernels of most of it."""
        weights = [float(np.sum(cost.total_s)) for cost in self.operators]
        off = sum(w * self.times.spread_of(cost.operator) for w, cost in zip(weights, self.operators, strict=True))
        return max(self.times.relative_error, off / max(sum(weights), 1e-30))

    @property
    def time_s(self) -> Count:
        return sum((cost.total_s for cost in self.operators), start=0.0)

    @property
    def low_s(self) -> Count:
        return self.time_s / (1 + self.relative_error)

    @property
    def high_s(self) -> Count:
        return self.time_s * (1 + self.relative_error)

    @property
    def flops(self) -> Count:
        return sum((cost.operator.flops * cost.operator.calls for cost in self.operators), start=0.0)

    @property
    def bytes(self) -> Count:
        return sum((cost.operator.bytes * cost.operator.calls for cost in self.operators), start=0.0)

    @property
    def arithmetic_intensity(self) -> Count:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes

    def shares(self) -> dict[str, Count]:
        """The share of each bound in the step's time; sums to 1, `idle` is 0 by definition."""
        seconds: dict[str, Count] = dict.fromkeys(BOUNDS, 0.0)
        for cost in self.operators:
            for bound, value in cost.seconds_by_bound().items():
                seconds[bound] = seconds[bound] + value
        return {bound: value / self.time_s for bound, value in seconds.items()}

    @property
    def bottleneck(self) -> str:
        """The bound with the largest share."""
        shares = self.shares()
        return max(shares, key=lambda bound: float(np.sum(shares[bound])))


def step_cost(model: ModelSpec, setup: EngineSetup, times: Times, shape: StepShape) -> StepCost:
    """The cost of one step of `shape`, or of many when the shape's sums are arrays (O(operators) either way).

    The working set that decides between cache and memory is what a step reads again and again: its weights and KV.
    """
    operators = step_operators(model, setup, shape, times.activation_bytes)
    working_set_bytes = _working_set(operators) if times.needs_working_set else 0.0
    costs = [OperatorCost(operator, times.of(operator, working_set_bytes)) for operator in operators]
    waiting_s = times.waiting_s(costs, model, shape)
    if waiting_s is not None:
        host = costs[-1]
        time = OperatorTime(host.time.time_s + waiting_s, 0.0, 0.0, host.time.overhead_s + waiting_s)
        costs[-1] = OperatorCost(host.operator, time)
    return StepCost(tuple(costs), times)


def _working_set(operators: Sequence[Operator]) -> float:
    """Weights and KV that the step reads, of the mean step where there are many."""
    return float(
        sum(np.mean(op.weight_bytes + (op.kv_bytes if op.kind == "attention" else 0.0)) * op.calls for op in operators)
    )
