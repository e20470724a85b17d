"""The closed forms of a two-state acceptance profile agree with known limits and with a brute-force count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.speculation.acceptance import AcceptanceProfile

ALPHA = st.floats(0, 1)
STRETCH = st.floats(1, 200)


@st.composite
def profiles(draw) -> AcceptanceProfile:
    low, high = sorted((draw(ALPHA), draw(ALPHA)))
    return AcceptanceProfile(
        predictable_alpha=high,
        predictable_tokens=draw(STRETCH),
        surprising_alpha=low,
        surprising_tokens=draw(STRETCH),
    )


@given(alpha=st.floats(0, 0.999), drafts=st.integers(0, 20))
def test_equal_states_are_the_formula_of_leviathan(alpha, drafts):
    """E = (1 - a^(g+1)) / (1 - a), Leviathan et al., ICML 2023, equation 1."""
    expected = (1 - alpha ** (drafts + 1)) / (1 - alpha)
    assert 1 + AcceptanceProfile.constant(alpha).expected_accepted(drafts) == pytest.approx(expected)


@given(profile=profiles(), drafts=st.integers(1, 12))
def test_long_stretches_separate_into_the_two_constant_rates(profile, drafts):
    """In stretches far longer than a step, rounds spread over the states as positions / tokens of a round do."""
    slow = profile.model_copy(
        update={
            "predictable_tokens": profile.predictable_tokens * 1e4,
            "surprising_tokens": profile.surprising_tokens * 1e4,
        }
    )
    emitted = [
        1 + AcceptanceProfile.constant(alpha).expected_accepted(drafts)
        for alpha in (profile.predictable_alpha, profile.surprising_alpha)
    ]
    share = slow.predictable_share
    rounds_a_token = share / emitted[0] + (1 - share) / emitted[1]
    assert 1 + slow.expected_accepted(drafts) == pytest.approx(1 / rounds_a_token, rel=5e-3)


@given(profile=profiles(), drafts=st.integers(1, 5), found=st.floats(0.05, 1))
def test_the_first_state_is_stationary_from_round_to_round(profile, drafts, found):
    """Every way a round can go, written out: states of its positions, and how many drafts are accepted."""
    start = profile._first_state(drafts, found)
    after = (1 - found) * start @ profile.transitions
    accepted_mean = 0.0
    for states in itertools.product((0, 1), repeat=drafts + 2):
        path = start[states[0]] * np.prod([profile.transitions[a, b] for a, b in itertools.pairwise(states)])
        reached = 1.0
        for k in range(drafts + 1):
            stops = 1.0 if k == drafts else 1 - profile.alphas[states[k]]
            after[states[k + 1]] += found * path * reached * stops
            accepted_mean += path * reached * stops * k
            reached *= 1 if k == drafts else profile.alphas[states[k]]
    assert after == pytest.approx(start, abs=1e-9)
    assert profile.expected_accepted(drafts, found) == pytest.approx(accepted_mean, abs=1e-9)


@given(profile=profiles(), drafts=st.integers(1, 12))
def test_more_drafts_accept_more_and_each_position_less(profile, drafts):
    chances = profile.acceptance_by_position(drafts)
    assert np.all(np.diff(chances) <= 1e-12) and np.all((chances >= -1e-12) & (chances <= 1 + 1e-12))
    assert profile.surprising_alpha - 1e-9 <= profile.mean_alpha <= profile.predictable_alpha + 1e-9


def test_bursts_accept_more_in_a_row_than_independent_drafts_of_the_same_mean():
    """What one constant alpha gets wrong: the first draft fails more often, and long runs are likelier."""
    bursty = AcceptanceProfile(predictable_alpha=0.95, predictable_tokens=20, surprising_alpha=0.2, surprising_tokens=8)
    flat = AcceptanceProfile.constant(bursty.mean_alpha)
    assert bursty.acceptance_by_position(8)[0] < flat.acceptance_by_position(8)[0]
    assert bursty.acceptance_by_position(8)[-1] > flat.acceptance_by_position(8)[-1]
