"""Which tokens does a cache of constant size keep, by the attention that they receive?

A policy gives every cached token a rank; the lowest goes first. Ranks of tokens that stay whatever happens are their
positions, 0 and above, so that the oldest of them goes first where nothing else is left; all others are below 0.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from membound.roofline.techniques import KvBudget

POOLED = 7  # neighbours whose attention SnapKV smooths over, itself included (Li et al., NeurIPS 2024, from memory)


class Policy(Protocol):
    """Ranks tokens by their position and by the attention that they received."""

    decode_scores: bool  # whether the attention of tokens that decode counts too, so that ranks change in each step

    def queries(self, new: int) -> int:
        """Of `new` tokens of a prompt, the last how many have their attention counted."""

    def scores(self, attention: Tensor) -> Tensor:
        """What a prompt's attention [..., tokens] is worth."""

    def rank(self, scores: Tensor, positions: Tensor, newest: Tensor) -> Tensor:
        """Ranks of tokens with these `scores` and `positions`, both [..., tokens], after the position `newest`."""


class HeavyHitters:
    """H2O: those that received most attention since they came, and the recent (Zhang et al., NeurIPS 2023)."""

    decode_scores = True

    def __init__(self, recent: int) -> None:
        self.recent = recent

    def queries(self, new: int) -> int:
        return new

    def scores(self, attention: Tensor) -> Tensor:
        return attention

    def rank(self, scores: Tensor, positions: Tensor, newest: Tensor) -> Tensor:
        return _ranked(scores, positions, newest - self.recent)


class Observed:
    """SnapKV: those to which the last tokens of the prompt pay attention, pooled over neighbours; all later tokens."""

    decode_scores = False

    def __init__(self, window: int) -> None:
        self.window = window

    def queries(self, new: int) -> int:
        return min(new, self.window)

    def scores(self, attention: Tensor) -> Tensor:
        pooled = functional.max_pool1d(attention.flatten(0, -2), POOLED, stride=1, padding=POOLED // 2)
        return pooled.view(attention.shape)

    def rank(self, scores: Tensor, positions: Tensor, newest: Tensor) -> Tensor:
        return _ranked(scores, positions, newest - self.window)


def _ranked(scores: Tensor, positions: Tensor, before: Tensor) -> Tensor:
    return torch.where(positions > before, positions.float(), -1 / (1 + scores))


def policy_of(budget: KvBudget) -> Policy:
    """The policy of a budget by which tokens are kept for the attention that they receive."""
    return HeavyHitters(budget.recent) if budget.policy == "h2o" else Observed(budget.recent)
