"""Which experts does each token go to, and in what order do their rows read an expert's weights once?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for

Scoring = Literal["softmax", "sigmoid"]
MOST_EXPERTS = 1024


@dataclass(frozen=True)
class Routing:
    """Where each of the tokens' top_k slots goes; slot = token * top_k + rank of the expert for that token.

    `experts` and `weights` are [tokens, top_k] (int32, fp32); `order` [slots] lists the slots expert by expert (int32),
    and expert e has those from `offsets[e]` to `offsets[e + 1]` (int32).
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]


@triton.jit
def moe_routing_kernel(logits, bias, experts, weights, stride, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
                       SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (token): all experts' scores in registers, the best taken out TOP_K times, of equals the lowest id."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    logit = tl.load(logits + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.where(real, tl.sigmoid(logit), 0.0)
    else:
        size = tl.exp(logit - tl.max(logit, 0))
        score = size / tl.sum(size, 0)
    rank = tl.where(real, score, float("-inf"))
    if bias is not None:
        rank += tl.load(bias + expert, mask=real, other=0.0)
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(rank, 0)
        winner = tl.min(tl.where(rank == best, expert, BLOCK), 0)
        chosen = tl.where(slot == k, winner, chosen)
        weight = tl.where(slot == k, tl.sum(tl.where(expert == winner, score, 0.0), 0), weight)
        rank = tl.where(expert == winner, float("-inf"), rank)
    if RENORMALIZE:
        weight /= tl.sum(weight, 0)
    tl.store(experts + token * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, weight, mask=slot < TOP_K)


def route(
    logits: Tensor, top_k: int, *, scoring: Scoring = "softmax", renormalize: bool = True, bias: Tensor | None = None
) -> Routing:
    """The `top_k` experts of each token by logits [tokens, experts], with their scores as weights.

    A `bias` [experts] (fp32) is added for the choice, but not to the weights; with `renormalize` those sum to 1.
    """
    check.strided("logits", logits, [None, None], [torch.float32, *check.HALVES])
    tokens, experts = logits.shape
    check.require(experts <= MOST_EXPERTS, "logits", f"{experts} experts are more than {MOST_EXPERTS}")
    check.require(1 <= top_k <= experts, "top_k", f"is {top_k}, should be 1 to {experts}")
    if bias is not None:
        check.tensor("bias", bias, [experts], [torch.float32], logits)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    launch(
        moe_routing_kernel,
        (tokens,),
        logits,
        bias,
        chosen,
        weights,
        logits.stride(0),
        config=configure("moe_routing", machine_for(logits)),
        EXPERTS=experts,
        TOP_K=top_k,
        SIGMOID=scoring == "sigmoid",
        RENORMALIZE=renormalize,
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
    )
    return Routing(chosen, weights, *expert_order(chosen, experts))


def expert_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The slots of `chosen` [tokens, top_k] expert by expert, each expert's in order, and where each expert begins."""
    ordered, order = torch.sort(chosen.flatten(), stable=True)
    edges = torch.arange(experts + 1, dtype=torch.int32, device=chosen.device)
    return order.int(), torch.searchsorted(ordered, edges, out_int32=True)


def route_reference(
    logits: Tensor, top_k: int, *, scoring: Scoring = "softmax", renormalize: bool = True, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Experts and weights in fp32, by a sort."""
    score = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    rank = score if bias is None else score + bias
    experts = rank.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, experts)
    return experts.int(), weights / weights.sum(-1, keepdim=True) if renormalize else weights
