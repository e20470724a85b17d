"""How many of a layer's experts do the tokens of a step choose?

The expected number of distinct experts under uniform routing is the occupancy problem, N (1 - (1 - k/N)^T).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.shape import Count

# How popular the experts of a mixture are: that of expert i goes as i^-s, or is what somebody measured of each.
Popularity = float | tuple[float, ...]


def distinct_experts(experts: float, top_k: float, tokens: Count, skew: Popularity = 0.0) -> Count:
    """The expected number of distinct experts that `tokens` tokens read: N (1 - (1 - k/N)^T) for uniform routing.

    With unequal popularity the expectation sums over the experts; a `skew` of 0 is uniform.
    """
    if skew == 0.0:
        share = top_k / experts
        return experts * (1.0 - (1.0 - share) ** tokens)
    return np.interp(np.log1p(tokens), *_skewed_curve(experts, top_k, skew))


def missing_experts(experts: float, top_k: float, tokens: Count, skew: Popularity, cached: float) -> Count:
    """The expected number of distinct experts that `tokens` tokens read and a cache of the last `cached` has not.

    With chance q_i that a step reads expert i, it lies in the cache with 1 - (1 - q_i)^t, where the characteristic time
    t in steps makes those chances sum to the cache's size (Che, Tung and Wang, Hierarchical Web Caching Systems, 2002,
    for steps in place of single requests). With uniform routing that is distinct experts times 1 - cached / experts.
    """
    if cached >= experts:
        return 0.0 * distinct_experts(experts, top_k, tokens, skew)
    if skew == 0.0:
        return distinct_experts(experts, top_k, tokens) * (1.0 - cached / experts)
    counts = np.concatenate([np.zeros(1), np.geomspace(1.0, 1e5, 60)])
    curve = _missing_curve(experts, top_k, skew, cached)
    return np.interp(np.log1p(tokens), np.log1p(counts), curve)


@cache
def _missing_curve(experts: float, top_k: float, skew: Popularity, cached: float) -> np.ndarray:
    chance = expert_chances(experts, top_k, skew)
    missing = [0.0]
    for tokens in np.geomspace(1.0, 1e5, 60):
        kept_out = np.minimum((1.0 - chance) ** tokens, 1.0 - 1e-12)  # of one step
        low, high = 1e-6, 1e12  # steps
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if np.sum(1.0 - kept_out**middle) < cached else (low, middle)
        missing.append(float(np.sum((1.0 - kept_out) * kept_out**high)))
    return np.array(missing)


@cache
def _skewed_curve(experts: float, top_k: float, skew: Popularity) -> tuple[np.ndarray, np.ndarray]:
    chance = expert_chances(experts, top_k, skew)
    tokens = np.concatenate([np.arange(0.0, 64.0), np.geomspace(64.0, 1e7, 200)])
    read = np.array([np.sum(1.0 - (1.0 - chance) ** t) for t in tokens])
    return np.log1p(tokens), read


def expert_chances(experts: float, top_k: float, skew: Popularity) -> np.ndarray:
    """The chance that a token takes each expert; raises MemboundError for loads of another number of experts."""
    weights = np.array(skew) if isinstance(skew, tuple) else np.arange(1.0, experts + 1.0) ** -skew
    if len(weights) != experts or np.count_nonzero(weights) < top_k:
        raise MemboundError(
            f"field 'expert_loads' has {len(weights)} loads, {np.count_nonzero(weights)} of them above 0, but the "
            f"model has {experts:.0f} experts, of which a token takes {top_k:.0f}; give one load for each"
        )
    chance = np.minimum(top_k * weights / weights.sum(), 1.0)
    for _ in range(50):  # a chance cannot exceed 1: what is cut off goes to the others
        missing = top_k - chance.sum()
        if missing < 1e-9:
            break
        free = chance < 1.0
        chance[free] = np.minimum(chance[free] * (1.0 + missing / chance[free].sum()), 1.0)
    return chance
