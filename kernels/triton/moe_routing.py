"""Which experts does each token go to, found by one program a token, and in what order do these read their tokens?"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.routing import Routing
from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.overlap import follow

Scoring = Literal["softmax", "sigmoid"]
MOST_EXPERTS = 1024


@triton.jit
def moe_routing_kernel(logits, bias, places, experts, weights, probabilities, scale, stride, EXPERTS: tl.constexpr,
                       TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
                       BIAS_LOGITS: tl.constexpr, GROUPS: tl.constexpr, GROUP_TOP_K: tl.constexpr,
                       BEST_TWO: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
                       OVERLAP: tl.constexpr, BLOCK_G: tl.constexpr):  # fmt: skip
    """Program (token): all experts' scores in registers, the best taken out TOP_K times, of equals the lowest id."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    there = 1
    if places is not None:
        there = (tl.load(places + token) >= 0).to(tl.int32)
    logit = tl.load(logits + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if BIAS_LOGITS:
        logit += tl.load(bias + expert, mask=real, other=0.0)
    if SIGMOID:
        score = tl.where(real, tl.sigmoid(logit), 0.0)
    else:
        size = tl.exp(logit - tl.max(logit, 0))
        score = size / tl.sum(size, 0)
    if probabilities is not None:
        share = tl.where(there == 1, score / tl.sum(score, 0), 0.0)
        tl.store(probabilities + token * EXPERTS + expert, share, mask=real)
    rank = tl.where(real, score, float("-inf"))
    if not BIAS_LOGITS:  # noqa: SIM102 -- both are decided by the compiler, one after the other
        if bias is not None:
            rank += tl.load(bias + expert, mask=real, other=0.0)
    if GROUPS > 1:
        group = expert // (EXPERTS // GROUPS)
        number = tl.arange(0, BLOCK_G)
        best_of = tl.full([BLOCK_G], float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            member = tl.where(group == g, rank, float("-inf"))
            value = tl.max(member, 0)
            if BEST_TWO:
                winner = tl.min(tl.where(member == value, expert, BLOCK), 0)
                value += tl.max(tl.where(expert == winner, float("-inf"), member), 0)
            best_of = tl.where(number == g, value, best_of)
        kept = tl.zeros([BLOCK], tl.int32)
        for _ in tl.static_range(GROUP_TOP_K):
            value = tl.max(best_of, 0)
            winner = tl.min(tl.where(best_of == value, number, BLOCK_G), 0)
            kept = tl.where(group == winner, 1, kept)
            best_of = tl.where(number == winner, float("-inf"), best_of)
        rank = tl.where(kept == 1, rank, float("-inf"))
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
        weight /= tl.sum(weight, 0) + 1e-20
    tl.store(experts + token * TOP_K + slot, tl.where(there == 1, chosen, EXPERTS), mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, tl.where(there == 1, weight * scale, 0.0), mask=slot < TOP_K)


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    biased: Literal["logits", "selection"] = "selection",
    scale: float = 1.0,
    groups: int = 1,
    group_top_k: int = 1,
    group_score: Literal["best", "best_two"] = "best",
    probabilities: bool = False,
    slots: Tensor | None = None,
) -> Routing:
    """The `top_k` experts of each token by logits [tokens, experts], with their scores as weights.

    A `bias` [experts] (fp32) is added for the choice, but not to the weights, or to the logits if `biased` says so;
    with `renormalize` the weights sum to 1, and they are multiplied by `scale`. Of `groups` of experts a token chooses
    within the `group_top_k` whose best expert, or best two, score most. A token whose place in `slots` [tokens] (int64)
    is negative takes none: its experts are one beyond the last, its weights and probabilities 0.
    """
    check.strided("logits", logits, [None, None], [torch.float32, *check.HALVES])
    tokens, experts = logits.shape
    check.require(experts <= MOST_EXPERTS, "logits", f"{experts} experts are more than {MOST_EXPERTS}")
    check.require(1 <= top_k <= experts, "top_k", f"is {top_k}, should be 1 to {experts}")
    even = groups > 0 and experts % groups == 0 and 1 <= group_top_k <= groups
    check.require(even, "groups", f"are {groups}, of which {group_top_k} are kept, for {experts} experts")
    if bias is not None:
        check.tensor("bias", bias, [experts], [torch.float32], logits)
    if slots is not None:
        check.tensor("slots", slots, [tokens], [torch.int64], logits)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    shares = torch.empty(tokens, experts, dtype=torch.float32, device=logits.device) if probabilities else None
    launch(
        moe_routing_kernel,
        (tokens,),
        logits,
        bias,
        slots,
        chosen,
        weights,
        shares,
        float(scale),
        logits.stride(0),
        config=configure("moe_routing", machine_for(logits)),
        EXPERTS=experts,
        TOP_K=top_k,
        SIGMOID=scoring == "sigmoid",
        RENORMALIZE=renormalize,
        BIAS_LOGITS=bias is not None and biased == "logits",
        GROUPS=groups,
        GROUP_TOP_K=group_top_k,
        BEST_TWO=group_score == "best_two",
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_G=triton.next_power_of_2(groups),
    )
    return Routing(chosen, weights, *expert_order(chosen, experts), shares)


@triton.jit(do_not_specialize=["slots"])
def expert_order_kernel(
    chosen, order, offsets, slots, OVERLAP: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (expert): counts the slots of those before it, then lists its own."""
    follow(OVERLAP)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    place = expert * 0
    for start in range(0, slots, BLOCK):
        slot = start + lane
        place += tl.sum((tl.load(chosen + slot, mask=slot < slots, other=EXPERTS) < expert).to(tl.int32), 0)
    tl.store(offsets + expert, place)
    for start in range(0, slots, BLOCK):
        slot = start + lane
        mine = (tl.load(chosen + slot, mask=slot < slots, other=EXPERTS) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, slot, mask=mine == 1)
        place += tl.sum(mine, 0)
    if expert == EXPERTS - 1:
        tl.store(offsets + EXPERTS, place)


def expert_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """As `routing.expert_order` of `chosen` (int32), by one launch where a sort takes several.

    They read all slots once for each expert, which are few bytes next to an expert's weights.
    """
    check.tensor("chosen", chosen, [None, None], [torch.int32])
    slots = chosen.numel()
    order = torch.empty(slots, dtype=torch.int32, device=chosen.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    config = configure("expert_order", machine_for(chosen))
    launch(expert_order_kernel, (experts,), chosen, order, offsets, slots, config=config, EXPERTS=experts)
    return order, offsets


@triton.jit(do_not_specialize=["tokens"])
def count_routed_kernel(offsets, probabilities, counted, load, probability, tokens, EXPERTS: tl.constexpr,
                        OVERLAP: tl.constexpr,
                        TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program (BLOCK_E experts)."""
    follow(OVERLAP)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    real = expert < EXPERTS
    begin = tl.load(offsets + expert, mask=real, other=0)
    slots = tl.load(offsets + expert + 1, mask=real, other=0) - begin
    tl.store(load + expert, tl.load(load + expert, mask=real, other=0) + slots, mask=real)
    total = tl.load(probability + expert, mask=real, other=0.0)
    for start in range(0, tokens, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = probabilities + token[:, None] * EXPERTS + expert[None, :]
        total += tl.sum(tl.load(at, mask=(token < tokens)[:, None] & real[None, :], other=0.0).to(tl.float64), 0)
    tl.store(probability + expert, total, mask=real)
    if tl.program_id(0) == 0:
        tl.store(counted, tl.load(counted) + tl.load(offsets + EXPERTS) // TOP_K)


def count_routed(routing: Routing, tokens: Tensor, load: Tensor, probability: Tensor) -> None:
    """Adds to `tokens` [] (int64) how many took experts, to `load` [experts] (int64) each expert's slots, and to
    `probability` [experts] (fp64) the sums of `routing.probabilities`, by one launch where PyTorch takes six."""
    if routing.probabilities is None:
        raise ValueError("routing.probabilities: are missing, a router that is counted says them")
    shares = routing.probabilities
    check.tensor("routing.probabilities", shares, [None, None], [torch.float32])
    experts = shares.shape[1]
    check.tensor("routing.offsets", routing.offsets, [experts + 1], [torch.int32], shares)
    check.tensor("tokens", tokens, [], [torch.int64], shares)
    check.tensor("load", load, [experts], [torch.int64], shares)
    check.tensor("probability", probability, [experts], [torch.float64], shares)
    config = configure("count_routed", machine_for(shares))
    launch(
        count_routed_kernel,
        (triton.cdiv(experts, config.tiles["BLOCK_E"]),),
        routing.offsets,
        shares,
        tokens,
        load,
        probability,
        shares.shape[0],
        config=config,
        EXPERTS=experts,
        TOP_K=routing.top_k,
    )


def route_reference(
    logits: Tensor, top_k: int, *, scoring: Scoring = "softmax", renormalize: bool = True, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Experts and weights in fp32, by a sort."""
    score = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    rank = score if bias is None else score + bias
    experts = rank.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, experts)
    return experts.int(), weights / weights.sum(-1, keepdim=True) if renormalize else weights
