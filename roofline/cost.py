"""How long does a step take, what binds it, and how sure is that?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator
from membound.roofline.parallel import Parallelism
from membound.roofline.results.result import BOUNDS
from membound.roofline.shape import Count, StepShape, is_there
from membound.roofline.stages import slowest_stage
from membound.roofline.step import step_operators
from membound.roofline.techniques import BatchOverlap, EngineSetup
from membound.roofline.times.operator import OperatorTime, Times

# Single steps whose cost is kept, the latest: a page or an answer asks for a few hundred.
MOST_KNOWN = 1024


@dataclass(frozen=True)
class OperatorCost:
    """An operator with its time; `bound` is the roof that asks most of it."""

    operator: Operator
    time: OperatorTime

    @property
    def total_s(self) -> Count:
        return self.time.time_s * self.operator.calls

    def slowed(self, share: Count) -> OperatorCost:
        """With arithmetic that takes this share longer."""
        return OperatorCost(self.operator, self.time.slowed(share))

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

    In a pipeline that of a micro-batch through all stages. One step is computed once: engines that differ by a
    technique, and the parts of a closed form, ask for the same ones again and again.
    """
    if any(isinstance(part, np.ndarray) for part in vars(shape).values()):
        return _step_cost(model, setup, times, shape)
    return _known_cost(model, setup, times, shape)


def _step_cost(model: ModelSpec, setup: EngineSetup, times: Times, shape: StepShape) -> StepCost:
    if setup.overlap is None:
        return StepCost(tuple(_costs(model, setup, times, shape)), times)
    halves = setup.overlap.halves(shape, setup.parallel.dp)
    costs = _costs(model, setup, times, shape.divided(halves))
    if np.all(np.asarray(halves) == 1.0):
        return StepCost(tuple(costs), times)
    return StepCost(tuple(_overlapped(costs, setup.overlap, times, shape, halves)), times)


_known_cost = lru_cache(maxsize=MOST_KNOWN)(_step_cost)


def micro_batch(parallel: Parallelism, shape: StepShape) -> tuple[StepShape, Count]:
    """The largest micro-batch of a step of a whole replica, and the step's seconds in passes of it.

    Each of m micro-batches passes all of the pp stages between two tokens of a sequence. A stage works on one at a
    time, so that a step takes m of its turns, or those of a whole pass where fewer than pp are under way and stages
    wait: max(m, pp) / pp passes of one micro-batch, were stages equal (`in_turns`). A prompt, or the chunk of it that a
    step has, is in one of them, for which the others wait.
    """
    if parallel.pp == 1:
        return shape, 1.0
    micro = parallel.micro_batches_of(shape.sequences)
    shape = shape.uneven(np.minimum(micro, float(parallel.pp)), parallel.dp)
    # of fewer sequences than fill all micro-batches the first has one on each rank
    whole = np.minimum(micro, np.maximum(shape.sequences / parallel.dp, 1.0))
    parts = np.where(np.asarray(shape.prefill_sequences) > 0, micro, whole)[()]
    return shape.divided(parts), np.maximum(micro / parallel.pp, 1.0)


def filling_passes(parallel: Parallelism, sequences: Count) -> Count:
    """Passes by which the last micro-batch leaves an empty pipeline after a step's: it waits for those before it.

    A step after another begins behind it, so that only the first of a row of steps takes so much longer.
    """
    return (parallel.busy_stages(sequences) - 1.0) / parallel.pp


def pipelined_cost(model: ModelSpec, setup: EngineSetup, times: Times, shape: StepShape) -> StepCost:
    """The cost of a step of a whole replica, whose pipeline has its sequences in micro-batches under way."""
    one, passes = micro_batch(setup.parallel, shape)
    cost = step_cost(model, setup, times, one)
    if setup.parallel.pp == 1:
        return cost
    return in_turns(cost, model, setup.parallel, setup.parallel.micro_batches_of(shape.sequences), passes)


def in_turns(cost: StepCost, model: ModelSpec, parallel: Parallelism, micro: Count, passes: Count = 1.0) -> StepCost:
    """So many passes of one of `micro` micro-batches, each at the pace of the slowest stage."""
    weights = slowest_stage(cost.operators, model.layers, parallel, micro)
    if weights is None:
        return cost
    each = [(item, weight * passes) for item, weight in zip(cost.operators, weights, strict=True)]
    slowed = (OperatorCost(item.operator.repeated(n), item.time.repeated(n)) for item, n in each)
    return StepCost(tuple(slowed), cost.times)


def uneven_passes(model: ModelSpec, setup: EngineSetup, times: Times, shape: StepShape) -> tuple[StepShape, Count]:
    """A micro-batch of a step of a replica, and the step's seconds in passes of it alone through all stages."""
    one, passes = micro_batch(setup.parallel, shape)
    if setup.parallel.pp == 1:
        return one, passes
    cost = step_cost(model, setup, times, one)
    micro = setup.parallel.micro_batches_of(shape.sequences)
    return one, passes * in_turns(cost, model, setup.parallel, micro).time_s / cost.time_s


def _overlapped(
    costs: Sequence[OperatorCost], overlap: BatchOverlap, times: Times, shape: StepShape, halves: Count
) -> Iterator[OperatorCost]:
    """The operators of both halves of a batch, given those of one: of the messages what the other half does not hide.

    One half's computing hides the other's messages, and the last message of all has nothing left to hide behind. The
    host prepares both halves at once.
    """
    *device, host = costs
    units = times.hardware.compute_units or 0
    slower: Count = units / (units - overlap.communication_units) - 1.0 if units > overlap.communication_units else 0.0
    slower = slower * is_there(shape.prefill_sequences) * (halves - 1.0)
    done = [cost if _hides(cost) else cost.slowed(slower) for cost in device]
    messages = [cost for cost in device if _hides(cost)]
    talking: Count = sum((cost.total_s for cost in messages), start=0.0)
    computing: Count = sum((cost.total_s for cost in done if not _hides(cost)), start=0.0)
    last = talking / max(1, sum(cost.operator.calls for cost in messages))
    seen = np.minimum(np.maximum(talking - computing, 0.0) + last / halves, talking) / np.maximum(talking, 1e-30)
    seen = np.where(halves > 1.0, seen, 1.0) if np.ndim(halves) else seen
    for cost in done:
        share = halves * seen if _hides(cost) else halves
        yield OperatorCost(cost.operator.repeated(halves), cost.time.repeated(share))
    once = times.of(replace(host.operator, sequences=0.0, elements=0.0, logits=0.0), 0.0).time_s
    twice_s = host.time.time_s * halves - once * (halves - 1.0)
    waited = OperatorTime(twice_s, host.time.memory_s, host.time.compute_s, twice_s)
    yield OperatorCost(host.operator.repeated(halves), waited)


def _hides(cost: OperatorCost) -> bool:
    """Whether an operator is a message that another batch's computing can hide."""
    collective = cost.operator.collective
    return collective is not None and collective.in_layers


def _costs(model: ModelSpec, setup: EngineSetup, times: Times, shape: StepShape) -> list[OperatorCost]:
    """The operators of a step one after the other.

    The working set that decides between cache and memory is what a step reads again and again: its weights and KV.
    """
    operators = step_operators(model, setup, shape, times.activation_bytes)
    working_set_bytes = _working_set(operators) if times.needs_working_set else 0.0
    costs = [OperatorCost(operator, times.of(operator, working_set_bytes)) for operator in operators]
    waiting_s = times.waiting_s(costs, model, shape.on_one_of(setup.parallel.dp))
    if waiting_s is not None:
        host = costs[-1]
        time = OperatorTime(host.time.time_s + waiting_s, 0.0, 0.0, host.time.overhead_s + waiting_s)
        costs[-1] = OperatorCost(host.operator, time)
    return costs


def _working_set(operators: Sequence[Operator]) -> float:
    """Weights and KV that the step reads, of the mean step where there are many."""
    return float(
        sum(np.mean(op.weight_bytes + (op.kv_bytes if op.kind == "attention" else 0.0)) * op.calls for op in operators)
    )
