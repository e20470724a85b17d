"""What experts that lie elsewhere cost: what a cache of the last used ones has not, over the link to where they lie."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from membound.roofline.chosen_experts import distinct_experts, missing_experts
from membound.roofline.cost import step_cost
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import get_hardware
from membound.roofline.memory import weights_bytes
from membound.roofline.models import get_model
from membound.roofline.remedies import remedies
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup, ExpertOffload
from membound.roofline.techniques.setup import ExpertStorage
from membound.roofline.times.known import RoofTimes

MIXTRAL = get_model("Mixtral-8x7B")
H100 = get_hardware("H100-SXM5")


def simulated_misses(experts: int, top_k: int, tokens: int, skew: float, cached: int, steps: int = 3000) -> float:
    """Misses a step of a cache that keeps the last used experts, with tokens that choose independently."""
    generator = np.random.default_rng(0)
    weights = np.arange(1.0, experts + 1) ** -skew
    kept: list[int] = []
    misses = 0
    for step in range(steps):
        drawn = [generator.choice(experts, top_k, replace=False, p=weights / weights.sum()) for _ in range(tokens)]
        chosen = set(np.concatenate(drawn).tolist())
        if step >= steps // 10:
            misses += len(chosen - set(kept))
        kept = ([e for e in kept if e not in chosen] + sorted(chosen))[-cached:]
    return misses / (steps - steps // 10)


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "skew", "cached"),
    [(8, 2, 1, 0.0, 4), (16, 2, 4, 0.0, 8), (32, 2, 2, 0.0, 16), (16, 1, 1, 1.0, 4), (32, 2, 2, 0.8, 8)],
)
def test_the_formula_is_what_a_simulated_cache_misses(experts, top_k, tokens, skew, cached):
    expected = simulated_misses(experts, top_k, tokens, skew, cached)
    assert missing_experts(experts, top_k, tokens, skew, cached) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.2])
@pytest.mark.parametrize("tokens", [1.0, 7.0, 300.0])
def test_misses_fall_with_the_cache_from_all_to_none(skew, tokens):
    misses = [float(missing_experts(64.0, 6.0, tokens, skew, cached)) for cached in (1, 8, 16, 32, 63, 64)]
    assert all(a > b for a, b in pairwise(misses)) and misses[-1] == 0.0
    assert misses[0] <= float(distinct_experts(64.0, 6.0, tokens, skew)) * 1.01


def test_popular_experts_are_missed_less():
    misses = [float(missing_experts(64.0, 4.0, 1.0, skew, 16.0)) for skew in (0.0, 0.5, 1.0, 1.5)]
    assert misses == sorted(misses, reverse=True)


def test_steps_in_one_call_are_those_one_by_one():
    tokens = np.array([1.0, 3.0, 40.0])
    for skew in (0.0, 1.0):
        together = missing_experts(32.0, 4.0, tokens, skew, 8.0)
        assert together == pytest.approx([float(missing_experts(32.0, 4.0, t, skew, 8.0)) for t in tokens])


def test_bytes_moved_are_misses_times_an_expert():
    setup = ExpertOffload(cached_experts=3).apply(EngineSetup())
    moved = [op for op in step_operators(MIXTRAL, setup, StepShape.decode(1.0, 100.0)) if op.kind == "expert_moves"]
    each = 3 * MIXTRAL.hidden * MIXTRAL.ffn.intermediate * 2.0
    assert len(moved) == 1 and moved[0].calls == MIXTRAL.layers
    assert moved[0].link_bytes == pytest.approx(2.0 * (1 - 3 / 8) * each)


def test_memory_is_freed_and_time_is_paid():
    times, shape = RoofTimes(H100), StepShape.decode(1.0, 100.0)
    plain = EngineSetup()
    costs, held = [], []
    for cached in (2, 4, 6, 8):
        setup = ExpertOffload(cached_experts=cached).apply(plain)
        costs.append(float(step_cost(MIXTRAL, setup, times, shape).time_s))
        held.append(weights_bytes(MIXTRAL, setup))
    assert costs == sorted(costs, reverse=True) and held == sorted(held)
    assert costs[-1] == pytest.approx(float(step_cost(MIXTRAL, plain, times, shape).time_s))
    assert held[-1] == pytest.approx(weights_bytes(MIXTRAL, plain)) and held[0] < 0.4 * held[-1]
    assert step_cost(MIXTRAL, ExpertOffload(cached_experts=2).apply(plain), times, shape).bottleneck == "link"


def test_what_is_read_faster_costs_less():
    times, shape = RoofTimes(H100), StepShape.decode(1.0, 100.0)
    rates = [
        float(
            step_cost(MIXTRAL, ExpertOffload(cached_experts=2, gb_per_s=rate).apply(EngineSetup()), times, shape).time_s
        )
        for rate in (1.0, 10.0, 100.0)
    ]
    assert rates == sorted(rates, reverse=True)


def test_a_model_without_experts_is_refused():
    with pytest.raises(MemboundError, match="expert_offload moves routed experts, and 'Llama"):
        check_parallel(get_model("Llama-3.2-1B"), ExpertOffload().apply(EngineSetup()))


def test_an_offload_that_does_not_fit_is_answered_with_the_most_experts_that_do():
    setup, memory = EngineSetup(expert_storage=ExpertStorage(4, "host")), 36 * 2**30
    said = remedies(MIXTRAL, setup, memory, lambda held: 0.0)
    room = Footprint.of(MIXTRAL, setup).usable_bytes(memory)
    cached = int(re.search(r"expert_offload (\d+) cached_experts", said)[1])
    held = [weights_bytes(MIXTRAL, EngineSetup(expert_storage=ExpertStorage(n, "host"))) for n in (cached, cached + 1)]
    assert held[0] <= room < held[1]
    assert "expert_offload" not in remedies(MIXTRAL, EngineSetup(), memory, lambda held: 0.0)
