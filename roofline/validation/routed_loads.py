"""How many tokens does a benchmark send to each expert of the mixture that it times?

Tables of aiconfigurator time a layer of experts on one rank with routers that they make up (`collector/helper.py` of
github.com/ai-dynamo/aiconfigurator, 2025): loads drawn from a power law, of which the rank with most is timed, or loads
that are all equal, of which the first rank is.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]

# Draws that a mean is over, as many as the collector times.
_DRAWS = 10


class RankLoad(NamedTuple):
    """What the timed rank has: (token, expert) pairs, distinct experts that they read, and how many it reads at least
    where loads are drawn."""

    pairs: float
    active: float
    least_active: float


class Groups(NamedTuple):
    """A router that first chooses `chosen` of a `number` of groups of experts and then experts of those alone."""

    number: int
    chosen: int


# Those of DeepSeek-V3 and R1 (config.json: n_group, topk_group), which vLLM's layer of their 256 experts applies.
DEEPSEEK_GROUPS = Groups(8, 4)


@cache
def drawn(experts: int, top_k: int, ranks: int, tokens: int, exponent: float) -> RankLoad:
    """The busiest rank where experts' loads follow a power law of that exponent: the mean of seeded draws.

    Loads lie between 1 and 0.8 `tokens` (0.01 and 2 where there are no more pairs than experts), are scaled to all
    pairs, rounded, and cut at `tokens`. What is then missing goes to the experts with least, the first of equal ones
    first.
    """
    generator = np.random.default_rng(0)
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    found = []
    for _ in range(_DRAWS):
        loads = _sample(generator.random(experts), exponent, low, high)
        counts = np.minimum(np.round(loads / loads.sum() * tokens * top_k), tokens)
        counts = _with_sum(counts, tokens * top_k, tokens).reshape(ranks, -1)
        busiest = counts[np.argmax(counts.sum(axis=1))]
        found.append((busiest.sum(), np.count_nonzero(busiest)))
    pairs, active = np.mean(found, axis=0)
    return RankLoad(float(pairs), float(active), float(np.min(found, axis=0)[1]))


def _sample(chance: Loads, exponent: float, low: float, high: float) -> Loads:
    """The power law's quantiles between `low` and `high`."""
    if abs(exponent - 1.0) < 1e-6:
        return low * (high / low) ** chance
    power = 1.0 - exponent
    return np.asarray((low**power + chance * (high**power - low**power)) ** (1.0 / power), dtype=np.float64)


def _with_sum(counts: Loads, total: int, most: int) -> Loads:
    """The counts with one more for those with least, or one less for those with most, until they sum to `total`."""
    counts = counts.copy()
    while (missing := int(total - counts.sum())) != 0:
        free = np.flatnonzero(counts < most if missing > 0 else counts > 0)
        order = np.argsort(np.sign(missing) * counts[free], kind="stable")
        counts[free[order[: abs(missing)]]] += np.sign(missing)
    return counts


def even(experts: float, top_k: float, ranks: float, tokens: float, groups: Groups | None = None) -> RankLoad:
    """The first rank where all experts are equally loaded: tokens choose every so many-th expert in turn.

    A router of `groups` finds an expert of the token's in each of them and all groups alike. It takes the first ones,
    and in place of what lies in the others the first experts that it comes to, which are the first rank's.
    """
    if groups is None:
        pairs = tokens * top_k / ranks
        return _known(pairs, min(experts / ranks, max(pairs, 1.0)))
    kept = top_k * groups.chosen / groups.number
    reached = min(groups.number / ranks, float(groups.chosen)) / groups.chosen
    pairs = tokens * (kept * reached + top_k - kept)
    in_reach = experts * groups.chosen / groups.number * reached
    return _known(pairs, min(in_reach, tokens * kept * reached + top_k - kept))


def _known(pairs: float, active: float) -> RankLoad:
    return RankLoad(pairs, active, active)
