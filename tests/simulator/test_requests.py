"""The requests of a workload are the same however they are read, and cost the memory of a chunk."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.scenario.tasks import task_profiles
from membound.roofline.scenario.workload import Workload
from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.simulator.scheduling.drafter import prompt_lookup
from membound.simulator.scheduling.workload import request_columns, request_stream
from membound.simulator.scheduling.workload.acceptance import AcceptanceSampler
from membound.simulator.scheduling.workload.prompts import load_prompts

SYNTHETIC = {
    "prompts": {"kind": "synthetic", "tokens": {"kind": "lognormal", "median": 512, "sigma": 0.5}},
    "output_tokens": {"kind": "lognormal", "median": 256, "sigma": 0.5},
    "rank_correlation": 0.4,
}
ARRIVALS = {
    "poisson": {"kind": "poisson", "rate_rps": 3.0},
    "closed_loop": {"kind": "closed_loop", "concurrency": 7, "think": {"kind": "exponential", "mean_s": 2.0}},
}


def workload(requests: int, arrivals: str = "poisson", **changes) -> Workload:
    return Workload.model_validate({"arrivals": ARRIVALS[arrivals], "requests": requests, **SYNTHETIC, **changes})


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("requests", [1, 8192, 20_000])
def test_columns_and_requests_are_the_same(arrivals, requests):
    columns = [request for chunk in request_columns(workload(requests, arrivals)) for request in chunk.requests()]
    assert columns == list(request_stream(workload(requests, arrivals)))
    assert [request.id for request in columns] == list(range(requests))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**63 - 1), short=st.integers(1, 9000))
def test_a_longer_workload_begins_with_the_shorter_one(seed, short):
    longer = request_stream(workload(9000, seed=seed))
    assert [request for request, _ in zip(longer, range(short), strict=False)] == list(
        request_stream(workload(short, seed=seed))
    )


def test_lengths_do_not_move_when_the_arrivals_change():
    one, other = (next(request_columns(workload(100, arrivals))) for arrivals in ARRIVALS)
    np.testing.assert_array_equal(one.prompt_tokens, other.prompt_tokens)
    np.testing.assert_array_equal(one.output_tokens, other.output_tokens)


def test_a_million_requests_take_the_memory_of_a_chunk_and_little_time():
    """Issue 4 allows 40 s and 2 GiB for simulating them; making them must not be felt in either."""
    tracemalloc.start()
    started = time.process_time()
    count = sum(len(chunk) for chunk in request_columns(workload(1_000_000)))
    spent_s, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1_000_000 and spent_s < 4 and peak < 8 * 2**20


def test_a_stream_of_requests_takes_the_memory_of_a_chunk():
    tracemalloc.start()
    count = sum(1 for _ in request_stream(workload(100_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 100_000 and peak < 8 * 2**20


def test_token_ids_are_drawn_for_the_runtime_and_are_in_the_vocabulary():
    requests = list(request_stream(workload(50), vocab=10))
    assert all(len(request.prompt_ids) == request.prompt_tokens for request in requests)
    assert {token for request in requests for token in request.prompt_ids} == set(range(10))
    assert requests == list(request_stream(workload(50), vocab=10))


@pytest.mark.parametrize(("drafts", "found"), [(1, 1.0), (4, 1.0), (8, 0.4)])
@pytest.mark.parametrize(
    ("name", "shares"), [("code", ()), ("reasoning", ()), ("chat", (1.2, 0.9, 0.7, 0.5, 0.5, 0.4, 0.3, 0.2))]
)
def test_sampled_acceptance_agrees_with_the_closed_form(name, shares, drafts, found):
    """Rounds over long outputs; each tolerance is 1.5 %, several standard errors of the 400,000 positions."""
    profile = task_profiles()[name].acceptance["eagle"].profile
    sampler, tokens = AcceptanceSampler(profile, 1, shares), 20_000
    rng = np.random.default_rng(2)
    rounds = found_rounds = accepted = emitted = 0
    by_position = np.zeros(drafts)
    for request in range(20):
        position = 1
        while position + drafts < tokens:
            hit = rng.random() < found
            right = sampler.accepted(request, tokens, position, drafts) if hit else 0
            rounds, found_rounds = rounds + 1, found_rounds + hit
            accepted, emitted = accepted + right, emitted + right + 1
            by_position[:right] += 1
            position += right + 1
    expected = profile.acceptance_by_position(drafts, found, shares)
    assert accepted / found_rounds == pytest.approx(expected.sum(), rel=0.015)
    assert emitted / rounds == pytest.approx(1 + found * expected.sum(), rel=0.015)
    np.testing.assert_allclose(by_position / found_rounds, expected, rtol=0.03, atol=2e-3)


def test_sampled_stretches_have_the_shares_and_bursts_of_the_profile():
    profile = AcceptanceProfile(predictable_alpha=1, predictable_tokens=12, surprising_alpha=0, surprising_tokens=5)
    sampler = AcceptanceSampler(profile, 4)
    right = np.array([sampler.accepted(request, 5000, at, 1) for request in range(40) for at in range(5000)])
    assert right.mean() == pytest.approx(profile.mean_alpha, abs=0.01)
    changes = np.flatnonzero(np.diff(right))
    assert np.diff(changes).mean() == pytest.approx((12 + 5) / 2, rel=0.03)


def test_acceptance_depends_on_the_request_and_position_alone():
    profile = task_profiles()["chat"].acceptance["ngram"].profile
    one, other = AcceptanceSampler(profile, 9), AcceptanceSampler(profile, 9)
    asked = [(request, position) for request in range(5) for position in range(1, 90)]
    forward = [one.accepted(request, 100, position, 6) for request, position in asked]
    backward = [other.accepted(request, 100, position, 6) for request, position in reversed(asked)]
    assert forward == backward[::-1]
    assert forward != [
        AcceptanceSampler(profile, 10).accepted(request, 100, position, 6) for request, position in asked
    ]


def test_prompt_lookup_on_recorded_code_emits_what_the_code_profile_says():
    """The measurement behind data/tasks/code.yaml: suffixes of 3 and 2 tokens, 4 drafts, over live.jsonl."""
    rounds = found = emitted = 0
    for prompt in load_prompts("live"):
        if prompt.task != "code":
            continue
        outputs, position = list(prompt.output_ids), 1
        while position < len(outputs):
            drafts = prompt_lookup([*prompt.prompt_ids, *outputs[:position]], 3, 2, 4)
            ahead = outputs[position : position + len(drafts)]
            right = next((i for i, (a, b) in enumerate(zip(drafts, ahead, strict=False)) if a != b), len(ahead))
            rounds, found, emitted = rounds + 1, found + bool(drafts), emitted + right + 1
            position += right + 1
    given = task_profiles()["code"].acceptance["ngram"]
    assert given.drafts == 4
    assert found / rounds == pytest.approx(given.found, abs=0.01)
    assert emitted / rounds == pytest.approx(given.emitted, rel=0.01)
