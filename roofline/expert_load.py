"""How unevenly do tokens and their experts fall on the devices that share a mixture's experts?

A step waits for the device that has most to do. With T tokens that each choose k of N experts, a device's load is a
sum of chances: those of its experts, whose popularity may be skewed, and the noise of T draws. The expected largest of
those loads tends to that of the most popular device as T grows, and to a single pair as T falls.

Experts lie on devices without regard to their popularity, and in their order where each one's load was measured. Where
they are balanced the most loaded expert gets the next of the redundant copies, again and again, and copies go to
devices from the most to the least loaded, each to the least loaded device with a free slot (DeepSeek-V3, 2024, section
3.4.1, and its load balancer EPLB; here without groups of experts, whose popularity nobody publishes). What is known of
popularity is taken to be right.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from membound.roofline.chosen_experts import Popularity, distinct_experts, expert_chances
from membound.roofline.shape import Count

Values = NDArray[np.float64]

# Random placements whose loads, each sorted, are averaged; drawn with a fixed seed.
_PLACEMENTS = 32
# Tokens at which the curves are tabulated.
_TOKENS: Values = np.unique(np.concatenate((np.arange(1.0, 17.0), np.geomspace(17.0, 1e9, 48).round())))
_LN_TOKENS: Values = np.log(_TOKENS)
# Places at which the distribution of the largest load is looked at.
_PLACES = 96


class Busiest(NamedTuple):
    """The most that a device of a step is expected to get: (token, expert) pairs, and distinct experts."""

    pairs: Count
    active: Count


class _Loads(NamedTuple):
    """Means and variances of the loads of kinds of devices, with how many are of each: [tokens, kinds], [kinds]."""

    mean: Values
    variance: Values
    devices: Values


def busiest_rank(
    experts: int, top_k: float, ranks: int, tokens: Count, skew: Popularity = 0.0, redundant: int | None = None
) -> Busiest:
    """The expected largest load among `ranks` devices where `tokens` tokens take `top_k` of `experts` experts.

    With `redundant` the experts are balanced, with so many copies beside them; without, they lie as they come.
    """
    ln_pairs, active = _curves(experts, top_k, ranks, skew, redundant)
    ln_tokens = np.log(np.maximum(tokens, 1.0))
    # of less than one token a step its share; beyond the table the load per token stays
    outside = np.minimum(tokens, 1.0) * np.maximum(tokens / _TOKENS[-1], 1.0)
    pairs = np.exp(np.interp(ln_tokens, _LN_TOKENS, ln_pairs)) * outside
    mean = distinct_experts(float(experts), float(top_k), tokens, skew) / ranks
    return Busiest(pairs, np.maximum(np.interp(ln_tokens, _LN_TOKENS, active) * np.minimum(tokens, 1.0), mean))


def slots(experts: int, ranks: int, redundant: int | None) -> float:
    """Experts whose weights a device holds, copies counted."""
    return (experts + (redundant or 0)) / ranks


@cache
def _curves(experts: int, top_k: float, ranks: int, skew: Popularity, redundant: int | None) -> tuple[Values, Values]:
    """Over `_TOKENS`: the logarithm of the busiest device's pairs, and its distinct experts."""
    chances = _placed_chances(experts, top_k, ranks, skew, redundant)
    # choices without replacement vary less than independent ones, which for equal devices is this factor in all
    spread = experts / (experts - 1.0)
    chosen = _profile(chances[None], chances[None] * (1.0 - chances[None]) * spread)
    pairs = _expected_most(_Loads(_TOKENS[:, None] * chosen.mean, _TOKENS[:, None] * chosen.variance, chosen.devices))
    read = 1.0 - (1.0 - chances) ** _TOKENS[:, None, None, None]
    active = _expected_most(_profile(read, read * (1.0 - read) * spread))
    each = chances.shape[-1]
    pairs = np.minimum(pairs, _TOKENS * min(top_k, each))
    active = np.minimum(active, np.minimum(each, _TOKENS * top_k))
    return np.log(np.maximum.accumulate(pairs)), np.maximum.accumulate(active)


def _placed_chances(experts: int, top_k: float, ranks: int, skew: Popularity, redundant: int | None) -> Values:
    """The chance that a token comes to each expert of each device: [placements, ranks, experts of a rank]."""
    chance = expert_chances(float(experts), float(top_k), skew)
    each = -(-(experts + (redundant or 0)) // ranks)
    if redundant is not None:
        return _balanced(chance, ranks, each, redundant)[None]
    padded = np.concatenate((chance, np.zeros(each * ranks - experts)))
    if isinstance(skew, tuple) or (skew == 0.0 and len(padded) == experts):
        return padded.reshape(1, ranks, each)
    generator = np.random.default_rng(0)
    shuffled = generator.permuted(np.tile(padded, (_PLACEMENTS, 1)), axis=1)
    return shuffled.reshape(_PLACEMENTS, ranks, each)


def _balanced(chance: Values, ranks: int, each: int, redundant: int) -> Values:
    """Copies of the most loaded experts, packed on the least loaded devices: [ranks, experts of a rank]."""
    copies = np.ones(len(chance))
    for _ in range(redundant):
        copies[np.argmax(chance / copies)] += 1
    loads = np.sort(np.repeat(chance / copies, copies.astype(int)))[::-1]
    placed: list[list[float]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for load in loads.tolist():
        rank = min((one for one in range(ranks) if len(placed[one]) < each), key=total.__getitem__)
        placed[rank].append(load)
        total[rank] += load
    return np.array([held + [0.0] * (each - len(held)) for held in placed])


def _profile(mean: Values, variance: Values) -> _Loads:
    """Loads of devices from those of their experts [tokens, placements, ranks, experts]: the mean over placements of
    the busiest, of the second, and so on; devices that are all alike are one kind."""
    means, variances = mean.sum(axis=-1), variance.sum(axis=-1)
    if all(np.all(np.ptp(one, axis=(1, 2)) <= 1e-9 * means.max(axis=(1, 2))) for one in (means, variances)):
        return _Loads(means[:, 0, :1], variances[:, 0, :1], np.array([float(means.shape[-1])]))
    order = np.argsort(-means, axis=-1)
    sorted_means, sorted_variances = (np.take_along_axis(one, order, axis=-1) for one in (means, variances))
    return _Loads(sorted_means.mean(axis=1), sorted_variances.mean(axis=1), np.ones(means.shape[-1]))


def _expected_most(loads: _Loads) -> Values:
    """The expected largest of independent counts: the sum over j of the chance that one of them exceeds j."""
    devices = float(loads.devices.sum())
    top, deviation = loads.mean.max(axis=1), np.sqrt(loads.variance.max(axis=1))
    low = np.floor(np.maximum(top - 5.0 * deviation, 0.0))
    high = top + (4.0 + math.sqrt(2.0 * math.log(devices))) * deviation + 12.0
    width = np.maximum(1.0, (high - low) / _PLACES)
    places = low[:, None] + (np.arange(_PLACES) + 0.5) * width[:, None] - 0.5
    ln_none_exceeds = np.zeros_like(places)
    for kind, count in enumerate(loads.devices):
        below = _chance_of_at_most(places, loads.mean[:, kind, None], loads.variance[:, kind, None])
        ln_none_exceeds += count * np.log(np.maximum(below, 1e-300))
    return np.asarray(low + width * np.sum(1.0 - np.exp(ln_none_exceeds), axis=1), dtype=np.float64)


def _chance_of_at_most(places: Values, mean: Values, variance: Values) -> Values:
    """The distribution of a sum of many chances as a Poisson count of its variance beside a part that is certain.

    Source: Roellin, Translated Poisson approximation, 2007. Poisson's distribution by Wilson and Hilferty's cube root
    (1931), and for small variances by its first term, v^a / a! that a or more come, which is never too little.
    """
    v = np.minimum(np.maximum(variance, 1e-12), np.maximum(mean, 1e-12))
    more = np.maximum(places + 1.0 - (mean - v), 1e-9)
    z = (1.0 - 1.0 / (9.0 * more) - np.cbrt(v / more)) * 3.0 * np.sqrt(more)
    ln_factorial = more * np.log(more) - more + 0.5 * np.log(2.0 * math.pi * more) + 1.0 / (12.0 * more)
    first_term = np.exp(np.minimum(more * np.log(v) - ln_factorial, 0.0))
    return np.where(more <= 1e-9, 0.0, np.maximum(_normal_cdf(z), 1.0 - first_term))


def _normal_cdf(z: Values) -> Values:
    """Within 3e-4 (Page, Approximations to the cumulative normal function, 1977)."""
    z = np.clip(z, -30.0, 30.0)
    return np.asarray(0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z * z * z))), dtype=np.float64)
