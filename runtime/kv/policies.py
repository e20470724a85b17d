"""Which tokens does a cache of constant size keep?

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

    decode_scores: bool  # whether the attention of tokens that decode counts too

    def queries(self, new: int) -> int:
        """Of `new` tokens of a prompt, the last how many have their attention counted."""

    def scores(self, attention: Tensor) -> Tensor:
        """What a prompt's attention [..., tokens] is worth."""

    def rank(self, scores: Tensor, positions: Tensor, prompt_end: Tensor, newest: Tensor) -> Tensor:
        """Ranks of tokens with these `scores` and `positions`, both [..., tokens].

        `prompt_end` and `newest` [..., 1] are the end of what was last read as a prompt, and the newest position.
        """


class Streaming:
    """StreamingLLM: the first tokens and the newest (Xiao et al., ICLR 2024)."""

    decode_scores = False

    def __init__(self, sinks: int) -> None:
        self.sinks = sinks

    def queries(self, new: int) -> int:
        return 0

    def scores(self, attention: Tensor) -> Tensor:
        return attention

    def rank(self, scores: Tensor, positions: Tensor, prompt_end: Tensor, newest: Tensor) -> Tensor:
        """The older, the lower; sinks as if they were always newer than the newest."""
        age = (newest - positions).float()
        return torch.where(positions < self.sinks, newest.float(), -age - 1)


class HeavyHitters:
    """H2O: those that received most attention since they came, and the recent (Zhang et al., NeurIPS 2023)."""

    decode_scores = True

    def __init__(self, recent: int) -> None:
        self.recent = recent

    def queries(self, new: int) -> int:
        return new

    def scores(self, attention: Tensor) -> Tensor:
        return attention

    def rank(self, scores: Tensor, positions: Tensor, prompt_end: Tensor, newest: Tensor) -> Tensor:
        return torch.where(positions > newest - self.recent, positions.float(), -1 / (1 + scores))


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

    def rank(self, scores: Tensor, positions: Tensor, prompt_end: Tensor, newest: Tensor) -> Tensor:
        return torch.where(positions >= prompt_end - self.window, positions.float(), -1 / (1 + scores))


def policy_of(budget: KvBudget) -> Policy:
    """The policy of a budget that evicts."""
    match budget.policy:
        case "streaming":
            return Streaming(budget.sinks)
        case "h2o":
            return HeavyHitters(budget.recent)
        case _:
            return Observed(budget.recent)
