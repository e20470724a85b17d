"""What does a mixture of experts do with each token?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.routing import GroupedLinear
from membound.runtime.arithmetic import Routing
from membound.runtime.blocks.base import FeedForward, RoutedFeedForward
from membound.runtime.blocks.ffn import Between, TwoLayers
from membound.runtime.blocks.routing import RouterStatistics, route
from membound.runtime.linear import Linear, grouped


class GroupedExperts(NamedTuple):
    """All experts of a mixture, each of their two layers multiplied by one kernel."""

    first: GroupedLinear
    between: Between
    second: GroupedLinear


class MixtureNetwork(RoutedFeedForward):
    """The weighted sum of the experts that the router chooses, beside a shared one that every token takes.

    Each expert's matrices are read once a step, for all of its tokens, and those of an expert without tokens not at
    all; where the kernels can, by one launch for all experts, without which the host must know who has tokens. `latent`
    leads to the width on which the routed experts work, and back. Experts that another device holds are
    None here, and `summed` then makes of this device's part the sum over all. `chosen` is told of each expert's number
    of slots and of the hidden state [tokens, hidden] before any of them computes.
    """

    def __init__(
        self,
        rule: Routing,
        top_k: int,
        router: Linear,
        experts: Sequence[FeedForward | None],
        *,
        kernels: Kernels,
        by_expert: bool = False,
        router_bias: Tensor | None = None,
        shared: FeedForward | None = None,
        shared_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
        device: torch.device,
    ) -> None:
        self.rule = rule
        self.top_k = top_k
        self.router = router
        self.kernels = kernels
        self.by_expert = by_expert
        self.router_bias = router_bias
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.latent = latent
        self.statistics = RouterStatistics(len(experts), device)
        self.summed: Callable[[Tensor], Tensor] | None = None
        self.chosen: Callable[[Sequence[int], Tensor], None] | None = None

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]; `slots` are those of the tokens' batch."""
        logits = self.router(x)
        inner = x if self.latent is None else self.latent[0](x)
        if self.together is not None:
            out = self._by_groups(inner, logits, self.together, slots)
        else:
            out = self._one_by_one(x, inner, logits)
        if self.latent is not None:
            out = self.latent[1](out)
        out = out if self.shared is None else self.kernels.add(out, self._shared(self.shared, x))
        return out if self.summed is None else self.summed(out)

    def routed(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        return self(x, batch.slots)

    @cached_property
    def together(self) -> GroupedExperts | None:
        """The experts as the kernels group them, made when they are first needed; None where each is computed apart."""
        found = [getattr(expert, "layers", None) for expert in self.experts]
        layers = [layers for layers in found if isinstance(layers, TwoLayers)]
        if self.by_expert or self.chosen is not None or len(layers) < len(self.experts):
            return None
        first = self._group(layers, "first")
        second = self._group(layers, "second") if first is not None else None
        return None if first is None or second is None else GroupedExperts(first, layers[0].between, second)

    def _group(self, layers: Sequence[TwoLayers], which: str) -> GroupedLinear | None:
        return grouped(self.kernels, [getattr(layer, which) for layer in layers])

    def _by_groups(self, inner: Tensor, logits: Tensor, experts: GroupedExperts, slots: Tensor | None) -> Tensor:
        routing = self.kernels.route(logits, self.top_k, self.rule, self.router_bias, slots)
        counted = self.statistics
        self.kernels.count_routed(routing, counted.tokens, counted.load, counted.probability)
        between = experts.between(experts.first(inner, routing, shared_rows=True))
        return self.kernels.combine(experts.second(between, routing, shared_rows=False), routing)

    def _one_by_one(self, x: Tensor, inner: Tensor, logits: Tensor) -> Tensor:
        routed = route(logits, self.top_k, self.rule, self.router_bias, by_expert=self.by_expert)
        self.statistics.add(routed)
        out = torch.zeros_like(inner)
        counts, start = routed.counts.tolist(), 0
        if self.chosen is not None:
            self.chosen(counts, x)
        for expert, count in zip(self.experts, counts, strict=True):
            if count and expert is not None:
                rows = routed.tokens[start : start + count]
                y = expert(inner[rows]) * routed.weights[start : start + count, None].to(x.dtype)
                out.index_add_(0, rows, y)
            start += count
        return out

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield "router", self.router
        if self.shared is not None:
            yield from self.shared.linears()
        if self.shared_gate is not None:
            yield "shared_gate", self.shared_gate
        if self.latent is not None:
            yield from zip(("latent_in", "latent_out"), self.latent, strict=True)
        for expert in self._held:
            yield from expert.linears()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the experts that a single token does not take."""
        held = self._held
        return max(0, len(held) - self.top_k) * sum(linear.nbytes for _, linear in held[0].linears())

    @property
    def _held(self) -> list[FeedForward]:
        return [expert for expert in self.experts if expert is not None]

    def _shared(self, shared: FeedForward, x: Tensor) -> Tensor:
        y = shared(x)
        return y if self.shared_gate is None else self.kernels.gated(y, self.shared_gate(x))
