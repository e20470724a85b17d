"""Which experts does each token of a mixture go to, and in what order are an expert's weights read once?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from membound.kernels.base import PackedWeight


class RoutingRule(Protocol):
    """How a router chooses; what each choice means says `runtime.arithmetic.Routing`."""

    @property
    def scores(self) -> Literal["softmax", "sigmoid"]: ...
    @property
    def normalized(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def bias(self) -> Literal["logits", "selection"]: ...
    @property
    def groups(self) -> int: ...
    @property
    def group_top_k(self) -> int: ...
    @property
    def group_score(self) -> Literal["best", "best_two"]: ...


@dataclass(frozen=True, eq=False)
class Routing:
    """Where each of the tokens' top_k slots goes; slot = token * top_k + rank of the expert for that token.

    `experts` and `weights` are [tokens, top_k] (int32, fp32); `order` [slots] lists the slots expert by expert (int32),
    and expert e has those from `offsets[e]` to `offsets[e + 1]` (int32). `probabilities` [tokens, experts] (fp32) are
    each token's scores as shares of 1, where they were asked for.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor
    probabilities: Tensor | None = None

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]

    @property
    def counts(self) -> Tensor:
        """How many slots each expert has: [experts]."""
        return self.offsets.diff()


class GroupedLinear(Protocol):
    """The linear layers [n, k] of a mixture's experts, multiplied by one kernel."""

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Each expert's weight, as a part of the group's memory."""

    def __call__(self, x: Tensor, routing: Routing, *, shared_rows: bool) -> Tensor:
        """Each slot's row of x times its expert's weight, transposed: [slots, n] in the order of slots.

        With `shared_rows`, x is [tokens, k] and a token's slots share its row; without, it is [slots, k].
        """


def route(logits: Tensor, top_k: int, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
    """The `top_k` experts of tokens with logits [tokens, experts], in fp32; of equal scores the lowest number wins."""
    scores, probabilities = expert_scores(logits, rule, bias)
    ranked = scores if bias is None or rule.bias == "logits" else scores + bias
    if rule.groups > 1:
        ranked = _within_best_groups(ranked, rule)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]  # [tokens, top_k]
    weights = scores.gather(1, chosen)
    if rule.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    order, offsets = expert_order(chosen, logits.shape[1])
    return Routing(chosen.int(), weights * rule.scale, order, offsets, probabilities)


def expert_scores(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each token's scores and their shares of 1, both [tokens, experts] in fp32."""
    logits = logits.float()
    if bias is not None and rule.bias == "logits":
        logits = logits + bias
    scores = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
    return scores, scores if rule.scores == "softmax" else scores / scores.sum(-1, keepdim=True)


def expert_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The slots of `chosen` [tokens, top_k] expert by expert, each expert's in order, and where each expert begins."""
    ordered, order = torch.sort(chosen.flatten(), stable=True)
    edges = torch.arange(experts + 1, dtype=chosen.dtype, device=chosen.device)
    return order.int(), torch.searchsorted(ordered, edges, out_int32=True)


def combined(slots: Tensor, routing: Routing) -> Tensor:
    """The weighted sum of each token's slots, [slots, n] to [tokens, n]."""
    by_token = slots.float().unflatten(0, routing.weights.shape)
    return (by_token * routing.weights[..., None]).sum(1).to(slots.dtype)


def _within_best_groups(ranked: Tensor, rule: RoutingRule) -> Tensor:
    """The scores, with -inf for all experts outside the best groups."""
    groups = ranked.unflatten(1, (rule.groups, -1))  # [tokens, groups, experts of a group]
    best = groups.topk(2 if rule.group_score == "best_two" else 1, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(rule.group_top_k, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
