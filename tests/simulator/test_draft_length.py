"""Adaptive drafts: the best lengths for what was measured, none where none pays, and hardly a loss against the best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import parse_scenario
from membound.roofline.speculation.token_tree import expected_tokens
from membound.simulator.run import run
from membound.simulator.scheduling.draft_length import StepSeconds, best_length

MOST = 4


@given(
    alphas=st.lists(st.floats(0.0, 0.99), min_size=1, max_size=4),
    base_s=st.floats(0.001, 1.0),
    share=st.floats(0.0, 2.0),
)
def test_no_other_length_emits_more(alphas, base_s, share):
    def rate(length):
        return sum(expected_tokens(alpha, length) for alpha in alphas) / (1 + share * length)

    assert rate(best_length(alphas, base_s, share * base_s, MOST)) == pytest.approx(max(map(rate, range(MOST + 1))))


@given(alpha=st.floats(0.01, 0.9), base_s=st.floats(0.001, 1.0))
def test_nothing_is_drafted_where_a_guess_costs_more_than_it_can_bring(alpha, base_s):
    """Leviathan et al., ICML 2023, corollary 3.9: some length gains exactly where a > c."""
    assert best_length([alpha] * 3, base_s, alpha * base_s * 1.001, MOST) == 0
    assert best_length([alpha] * 3, base_s, alpha * base_s * 0.999, MOST) >= 1


@given(base_s=st.floats(0.001, 1.0), share=st.floats(0.0, 2.0), paused=st.integers(0, 7), times=st.floats(1.0, 1000.0))
def test_costs_are_a_line_whichever_step_the_machine_interrupted(base_s, share, paused, times):
    cost = StepSeconds()
    for i in range(8):
        length = MOST * (i % 2)
        cost.add(length, base_s * (1 + share * length) * (times if i == paused else 1))
    assert cost.line == pytest.approx((base_s, share * base_s), rel=1e-6, abs=1e-9)


def served(batch, alpha, gamma, adaptive=False):
    techniques = [{"name": "continuous_batching"}]
    if gamma:
        fields = {"draft": "Qwen2.5-0.5B", "gamma": gamma, "alpha": alpha, "adaptive": adaptive}
        techniques.append({"name": "draft_model_speculation"} | fields)
    scenario = {
        "name": "adaptive",
        "model": "Qwen2.5-7B",
        "hardware": "H100-SXM5",
        "engine": {"max_num_seqs": batch, "max_batched_tokens": 8192},
        "techniques": techniques,
        "workload": {
            "arrivals": {"kind": "closed_loop", "concurrency": batch},
            "requests": batch,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 64}},
            "output_tokens": {"kind": "fixed", "tokens": 250},
        },
    }
    return run(parse_scenario(scenario), get_hardware("H100-SXM5")).summary.output_tokens_per_s


@pytest.mark.parametrize(("batch", "alpha"), [(1, 0.8), (1, 0.05), (32, 0.6), (64, 0.2)])
def test_adaptive_drafts_come_close_to_the_best_length_that_is_fixed(batch, alpha):
    fixed = [served(batch, alpha, gamma) for gamma in (0, 2, 4)]
    adaptive = served(batch, alpha, 4, adaptive=True)
    assert adaptive > 0.95 * max(fixed)
    if min(fixed) < 0.9 * max(fixed):
        assert adaptive > min(fixed)


def with_prompts_in_every_step(technique):
    """Tokens a second where prompts fill the steps of half a run: a queue, and chunks of prompts beside decodes."""
    scenario = {
        "name": "queued",
        "model": "Llama-3.1-8B",
        "hardware": "L40S",
        "engine": {"profile": "vllm", "max_num_seqs": 128, "max_batched_tokens": 1024},
        "techniques": ["continuous_batching", *([technique] if technique else [])],
        "workload": {
            "arrivals": {"kind": "closed_loop", "concurrency": 256},
            "requests": 256,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "lognormal", "median": 512, "sigma": 0.5}},
            "output_tokens": {"kind": "lognormal", "median": 128, "sigma": 0.5},
        },
    }
    return run(parse_scenario(scenario)).summary.output_tokens_per_s


def test_drafts_adapt_where_no_step_is_without_prompts():
    eagle = {"name": "eagle", "depth": 4, "tree_size": 16}
    none, fixed, adaptive = (with_prompts_in_every_step(one) for one in (None, eagle, eagle | {"adaptive": True}))
    assert fixed < 0.9 * none and adaptive > 0.95 * none
