"""Verification keeps the distribution: greedy tokens are equal, sampled ones are equally distributed."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from membound.runtime.sampling import GreedySampler, Guesses, TemperatureSampler


def test_greedy_accepts_the_prefix_that_the_model_would_have_written():
    logits = torch.full((4, 5), -1.0)
    for row, token in enumerate((2, 4, 1, 3)):
        logits[row, token] = 1.0
    assert greedy(logits, (2, 4, 0)) == [(2, 4, 1)]
    assert greedy(logits, (2, 4, 1)) == [(2, 4, 1, 3)]
    assert greedy(logits, (0, 4, 1)) == [(2,)]
    assert greedy(logits, (), (4, 1)) == [(2,), (4, 1, 3)]


def greedy(logits, *drafts):
    return [found.tokens for found in GreedySampler().verify(logits, [Guesses(draft) for draft in drafts])]


@pytest.mark.parametrize("draft", [0, 1, 3])
def test_the_first_token_behind_a_draft_is_distributed_as_without_one(draft):
    """Leviathan et al., ICML 2023, appendix A.1: modified rejection sampling leaves the distribution as it is."""
    logits = torch.tensor([[0.5, 1.5, -0.5, 1.0], [0.0, 0.0, 0.0, 0.0]])
    sampler = TemperatureSampler(0.8, seed=3)
    drawn = torch.zeros(4)
    trials = 4000
    for _ in range(trials):
        ((emitted, _),) = sampler.verify(logits, [Guesses((draft,))])
        drawn[emitted[0]] += 1
        assert len(emitted) == (2 if emitted[0] == draft else 1)
    expected = torch.softmax(logits[0] / 0.8, dim=-1) * trials
    assert chisquare(drawn.numpy(), expected.numpy() * drawn.sum().item() / expected.sum().item()).pvalue > 1e-4


def test_a_low_temperature_approaches_greedy_decoding():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    sampled = TemperatureSampler(1e-4, seed=0).verify(logits, [Guesses()] * 6)
    assert sampled == GreedySampler().verify(logits, [Guesses()] * 6)
