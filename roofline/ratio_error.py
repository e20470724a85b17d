"""How far may the ratio of two predicted speeds be off? Errors that both times share cancel in it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from membound.roofline.techniques import EngineSetup

# Sequences in a step that differ by less leave kernels as they are.
SAME_BATCH = 1.05


@dataclass(frozen=True)
class Timed:
    """The share of each bound in an engine's time, what each bound's kernels are, and the sequences of a step."""

    shares: Mapping[str, float]
    kernels: Mapping[str, Hashable]
    sequences: float

    def apart(self, other: Timed) -> float:
        """From 0, where both spend their time in the same kernels, to 1, where they share none.

        The root of the summed squares of how far the shares of each kernel differ: with independent errors of kernels
        that are alike in size, the logarithm of the ratio is off by so many times as much as that of a time. Kernels of
        other batches are others.
        """
        if abs(math.log(self.sequences / other.sequences)) > math.log(SAME_BATCH):
            return 1.0
        own, others = self._by_kernel(), other._by_kernel()
        return min(1.0, math.hypot(*(own.get(key, 0.0) - others.get(key, 0.0) for key in own | others)))

    def _by_kernel(self) -> dict[tuple[str, Hashable], float]:
        return {(bound, self.kernels.get(bound)): share for bound, share in self.shares.items()}


def kernels_of(setup: EngineSetup, *place: Hashable) -> dict[str, Hashable]:
    """What the time under each bound depends on but for the load; `place` is the model and where it runs."""
    plan = setup.precision
    engine = (*place, setup.parallel, setup.profile, setup.drafts, setup.overlap)
    experts = (setup.expert_storage, setup.expert_skew, setup.redundant_experts)
    products = (*engine, plan.weights, plan.activations, plan.exceptions, *experts)
    attention = (*engine, plan.kv, setup.kv_budget, setup.fused_attention, setup.absorbed_mla)
    rest: dict[str, Hashable] = dict.fromkeys(("link", "overhead", "idle", "drafting"), engine)
    return rest | {"memory_weights": products, "memory_kv": attention, "compute": (products, attention)}


def ratio_error(error: float, before: Timed, after: Timed, ratio: float) -> float:
    """The relative interval of `ratio`, the speed after over that before, where a single time is within `error`.

    A ratio that comes from the order of work, rather than from its kernels, is as unsure as it is large: whole at 2.
    """
    differs = max(before.apart(after), min(1.0, abs(math.log2(ratio))))
    return math.expm1(math.log1p(error) * differs)
