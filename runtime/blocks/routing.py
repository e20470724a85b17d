"""Which experts does each token go to, with which weights, and how evenly are they used?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels import routing
from membound.runtime.arithmetic import Routing


@dataclass(frozen=True)
class Routed:
    """The slots of a step, expert by expert: slot i sends token `tokens[i]` with `weights[i]`, both [slots].

    Expert e has the `counts[e]` slots that follow those of the experts before it.
    """

    tokens: Tensor
    weights: Tensor
    counts: Tensor  # [experts]
    probabilities: Tensor  # [tokens, experts], each token's scores as shares of 1


def route(logits: Tensor, top_k: int, rule: Routing, bias: Tensor | None = None, *, by_expert: bool = False) -> Routed:
    """The experts of tokens with these logits [tokens, experts], in fp32; of equal scores the lowest number wins.

    A token chooses its `top_k` experts, or, `by_expert`, each expert its even share of the tokens * top_k slots (Zhou
    et al. 2022, arXiv 2202.09368, section 3.2).
    """
    if by_expert:
        scores, probabilities = routing.expert_scores(logits, rule, bias)
        return _experts_choose(scores, probabilities, top_k, rule)
    chosen = routing.route(logits, top_k, rule, bias)
    assert chosen.probabilities is not None, "the plain router says them"
    order = chosen.order.long()
    return Routed(order // top_k, chosen.weights.flatten()[order], chosen.counts, chosen.probabilities)


def _experts_choose(scores: Tensor, probabilities: Tensor, top_k: int, rule: Routing) -> Routed:
    tokens, experts = scores.shape
    capacity = min(tokens, -(-tokens * top_k // experts))
    best = scores.T.topk(capacity, dim=-1)  # [experts, capacity]
    return Routed(
        tokens=best.indices.flatten(),
        weights=best.values.flatten() * rule.scale,
        counts=torch.full((experts,), best.indices.shape[1], device=scores.device),
        probabilities=probabilities,
    )


class RouterStatistics:
    """How often each expert of one layer was chosen since the beginning or the last `reset`.

    All is counted on the device, so that a captured step counts each time it is replayed.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.load = torch.zeros(experts, dtype=torch.int64, device=device)  # slots
        self.probability = torch.zeros(experts, dtype=torch.float64, device=device)  # sums over tokens

    def add(self, routed: Routed) -> None:
        """Counts a step."""
        self.tokens += routed.probabilities.shape[0]
        self.load += routed.counts
        self.probability += routed.probabilities.double().sum(0)

    def reset(self) -> None:
        self.tokens.zero_()
        self.load.zero_()
        self.probability.zero_()

    @property
    def busiest(self) -> float:
        """The load of the busiest expert over the mean: 1 is even."""
        return float(self.load.max() / self.load.double().mean()) if self.tokens else 1.0

    @property
    def auxiliary_loss(self) -> float:
        """experts * sum of f_e P_e, f the share of slots and P the mean probability: 1 where both are even.

        Fedus et al. 2021, Switch Transformers, arXiv 2101.03961, equation 4, without its coefficient.
        """
        if not self.tokens:
            return 1.0
        shares = self.load.double() / self.load.sum()
        return float(len(self.load) * (shares * self.probability / self.tokens).sum())
