"""What do techniques gain in every combination, and how much of it is each one's?

A coalition of techniques is worth the logarithm of its gain over the plain engine. The share of each technique is its
mean contribution over all orders (Shapley, A value for n-person games, 1953).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from membound.roofline.progress import Progress
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import GainMetric, Technique
from membound.simulator.costing import Costing, Served

# 2^k subsets are all looked at for stacks of up to so many techniques.
MOST_FACTORIAL = 8
Subset = frozenset[int]


@dataclass(frozen=True)
class StackStep:
    """A technique added to those before it; a refused one adds nothing, and `reason` says why."""

    technique: str
    baseline: str
    gain: float | None
    together: float | None
    low: float | None
    high: float | None
    bottleneck_before: str
    bottleneck_after: str | None
    batch: float | None
    reason: str | None = None
    drafting: dict[str, Any] | None = None


@dataclass(frozen=True)
class Pair:
    """Two techniques: the product of their gains, and the gain of both."""

    first: str
    second: str
    product: float | None
    real: float | None
    reason: str | None = None

    @property
    def ratio(self) -> float | None:
        """Real against product: below 1 they save the same, above 1 each makes room for the other."""
        return None if self.real is None or self.product is None else self.real / self.product


class StackingGame:
    """The value of each subset of techniques at a point, evaluated once each; what is impossible has a reason."""

    def __init__(self, techniques: Sequence[Technique], plain: Scenario, costing: Costing, metric: GainMetric) -> None:
        self.techniques = techniques
        self.plain = plain
        self.metric = metric
        self._costing = costing
        self._served: dict[Subset, Served | str] = {}

    def scenario(self, subset: Iterable[int]) -> Scenario:
        """The plain engine with these techniques beside its own."""
        chosen = (self.techniques[index] for index in sorted(subset))
        return self.plain.with_techniques((*self.plain.techniques, *chosen))

    def served(self, subset: Subset) -> Served | str:
        """What the plain engine with these techniques comes to, or why it cannot be."""
        if subset not in self._served:
            self._served[subset] = self._costing.served(self.scenario(subset))
        return self._served[subset]

    def ahead(self, most_factorial: int, progress: Progress) -> None:
        """Computes what will be asked for at once: all subsets where they are few, else those of two or less."""
        every = range(len(self.techniques))
        largest = len(every) if len(every) <= most_factorial else 2
        sizes = range(min(largest, len(every)) + 1)
        subsets = (subset for size in sizes for subset in itertools.combinations(every, size))
        self._costing.ahead([self.scenario(subset) for subset in subsets], progress)

    def gain(self, subset: Subset) -> float | None:
        """The gain over the plain engine; None where the subset is impossible."""
        found, plain = self.served(subset), self.served(frozenset())
        if isinstance(found, str) or isinstance(plain, str):
            return None
        return found.better(plain, self.metric)

    def members(self) -> tuple[int, ...]:
        """The techniques of the given order that can join those before them."""
        joined: Subset = frozenset()
        for index in range(len(self.techniques)):
            if not isinstance(self.served(joined | {index}), str):
                joined |= {index}
        return tuple(sorted(joined))

    def steps(self, order: Sequence[int], error: float, *, alone: bool = False) -> Iterator[StackStep]:
        """The techniques added one by one, or each to the plain engine alone, with interval `error` of each ratio."""
        before: Subset = frozenset()
        for index in order:
            base, subset = self.served(before), before | {index}
            found = self.served(subset)
            assert not isinstance(base, str), "only what is possible is added to"
            technique = self.techniques[index]
            name, baseline = technique.name, technique.compared_with(self.plain.setup)
            if isinstance(found, str):
                yield StackStep(name, baseline, None, None, None, None, base.bottleneck, None, None, found)
                continue
            gain, together = found.better(base, self.metric), self.gain(subset)
            within = 1.0 + found.gain_error(base, error)
            low, high = gain / within, gain * within
            moved = (base.bottleneck, found.bottleneck, found.batch)
            drafting = found.drafting if technique.layer == "steps" else None
            yield StackStep(name, baseline, gain, together, low, high, *moved, drafting=drafting)
            before = before if alone else subset

    def greedy_order(self, members: Sequence[int]) -> list[int]:
        """Each time the technique that gains most on top of those before it; impossible ones come last."""
        order: list[int] = []
        while len(order) < len(members):
            taken = frozenset(order)
            left = [index for index in members if index not in taken]
            order.append(max(left, key=lambda index: self.gain(taken | {index}) or 0.0))
        return order

    def best_order(self, members: Sequence[int]) -> list[int] | None:
        """The order whose first techniques, however many, gain most: the largest sum of ln-gains over its beginnings.

        By dynamic programming over subsets; None where no order is possible from beginning to end.
        """
        best: dict[Subset, tuple[float, list[int]]] = {frozenset(): (0.0, [])}
        for size in range(1, len(members) + 1):
            for subset in map(frozenset, itertools.combinations(members, size)):
                gain = self.gain(subset)
                ways = [best[subset - {last}] + (last,) for last in subset if subset - {last} in best]
                if gain is None or not ways:
                    continue
                value, order, last = max(ways, key=lambda way: way[0])
                best[subset] = (value + math.log(gain), [*order, last])
        found = best.get(frozenset(members))
        return None if found is None else found[1]

    def shapley(self, members: Sequence[int]) -> dict[int, float] | None:
        """Each member's mean contribution to the ln-gain over all orders that are possible; they sum to the whole.

        Orders are counted by subset: those that lead to it, and those that lead on to all members. None where there
        is no possible order.
        """
        every = frozenset(members)
        subsets = [frozenset(c) for size in range(len(every) + 1) for c in itertools.combinations(members, size)]
        possible = {subset for subset in subsets if self.gain(subset) is not None}
        into: dict[Subset, float] = {frozenset(): 1.0}
        for subset in subsets[1:]:
            into[subset] = sum(into[subset - {last}] for last in subset) if subset in possible else 0.0
        onward: dict[Subset, float] = {every: 1.0}
        for subset in reversed(subsets[:-1]):
            onward[subset] = sum(onward[subset | {new}] for new in every - subset) if subset in possible else 0.0
        orders = into[every] if every in possible else 0.0
        if not orders:
            return None
        shares = dict.fromkeys(members, 0.0)
        for subset in possible - {every}:
            for index in every - subset:
                after = subset | {index}
                if after in possible:
                    weight = into[subset] * onward[after] / orders
                    shares[index] += weight * (math.log(self._known(after)) - math.log(self._known(subset)))
        return shares

    def _known(self, subset: Subset) -> float:
        gain = self.gain(subset)
        assert gain is not None
        return gain

    def pairs(self) -> Iterator[Pair]:
        """All two of the techniques that can run alone."""
        for first, second in itertools.combinations(range(len(self.techniques)), 2):
            names = self.techniques[first].name, self.techniques[second].name
            one, other = self.gain(frozenset({first})), self.gain(frozenset({second}))
            if one is None or other is None:
                continue
            found = self.served(frozenset({first, second}))
            if isinstance(found, str):
                yield Pair(*names, one * other, None, found)
            else:
                yield Pair(*names, one * other, self.gain(frozenset({first, second})))

    def best_known(self) -> tuple[Subset, float]:
        """Of the subsets that were evaluated the one that gains most."""
        gains = {subset: gain for subset in self._served if (gain := self.gain(subset)) is not None}
        best = max(gains, key=lambda subset: (gains[subset], -len(subset)))
        return best, gains[best]
