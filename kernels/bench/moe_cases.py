"""With which mixtures of experts are their routing and their products checked and timed?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from membound.kernels.bench.linear_cases import PRODUCTS, Shape
from membound.kernels.bench.trial import Case, Comparison, Inputs, Trial, exact, fp8_product, product
from membound.kernels.triton.linear_byte import ByteWeight
from membound.kernels.triton.linear_int4 import Int4Weight
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight
from membound.kernels.triton.linear_w8a8 import Fp8Blocks
from membound.kernels.triton.moe_experts import FORMATS, ExpertFormat, ExpertWeights
from membound.kernels.triton.moe_linear import (
    moe_combine,
    moe_linear,
    moe_linear_bytes,
    moe_linear_reference,
)
from membound.kernels.triton.moe_routing import Routing, count_routed, route, route_reference


def _experts(inputs: Inputs, format: ExpertFormat, experts: int, n: int, k: int) -> ExpertWeights:
    if format == "half":
        return ExpertWeights(format, inputs.normal(experts, n, k))
    if format == "mxfp4":
        packed = [Mxfp4Weight.quantize(inputs.normal(n, k)) for _ in range(experts)]
        data, scale = (torch.stack(parts) for parts in ([w.data for w in packed], [w.scale for w in packed]))
        return ExpertWeights(format, data, scale, rows=n)
    if format == "int4":
        few = [Int4Weight.quantize(inputs.normal(n, k), 32, symmetric=False) for _ in range(experts)]
        zeros = torch.stack([w.zero for w in few if w.zero is not None])
        data, scale = (torch.stack(parts) for parts in ([w.data for w in few], [w.scale for w in few]))
        return ExpertWeights(format, data, scale, rows=n, zero=zeros)
    if format == "fp8_blocks":
        blocks = [Fp8Blocks.quantize(inputs.normal(n, k), 128) for _ in range(experts)]
        return ExpertWeights(format, torch.stack([w.data for w in blocks]), torch.stack([w.scale for w in blocks]))
    quantized = [ByteWeight.quantize(inputs.normal(n, k), format) for _ in range(experts)]
    return ExpertWeights(format, torch.stack([w.data for w in quantized]), torch.stack([w.scale for w in quantized]))


def _moe(
    inputs: Inputs,
    format: ExpertFormat,
    tokens: int,
    experts: int,
    top_k: int,
    shape: Shape,
    *,
    rounded: bool = False,
) -> Trial:
    """The product of routed tokens; what the router chose is a case of its own."""
    n, k = shape
    routing = route(inputs.normal(tokens, experts, dtype=torch.float32), top_k)
    weight, halves = _experts(inputs, format, experts, n, k), inputs.normal(tokens, k)
    x = Fp8Blocks.quantize(halves, 1) if rounded else halves

    def compare(y: Tensor) -> list[Comparison]:
        combined = moe_combine(y, routing)
        sums = (y.float().view(tokens, top_k, n) * routing.weights[..., None]).sum(1)
        return [
            (fp8_product if rounded else product)(y, _by_expert(x, weight, routing)),
            product(combined, sums),
        ]

    nbytes, flops = moe_linear_bytes(x, weight, routing), 2 * tokens * top_k * n * k
    multiplied = PRODUCTS[rounded]
    run = partial(moe_linear, x, weight, routing, shared_rows=True, dtype=torch.bfloat16)
    return Trial(run, compare, nbytes, flops, multiplied)


def _by_expert(x: Tensor | Fp8Blocks, weight: ExpertWeights, routing: Routing) -> Tensor:
    """The reference in pieces of few tokens: it holds a whole expert for every slot."""
    pieces = []
    x = x.dequantized() if isinstance(x, Fp8Blocks) else x
    for first in range(0, x.shape[0], 8):
        rows = slice(first, first + 8)
        part = Routing(routing.experts[rows], routing.weights[rows], routing.order, routing.offsets)
        used = torch.unique(part.experts)
        places = torch.searchsorted(used, part.experts.contiguous()).int()
        scale = None if weight.scale is None else weight.scale[used.long()]
        zero = None if weight.zero is None else weight.zero[used.long()]
        few = ExpertWeights(weight.format, weight.data[used.long()], scale, rows=weight.rows, zero=zero)
        local = Routing(places, part.weights, part.order, part.offsets)
        pieces.append(moe_linear_reference(x[rows], few, local, shared_rows=True))
    return torch.cat(pieces)


def _route(inputs: Inputs, tokens: int, experts: int, top_k: int) -> Trial:
    logits = inputs.normal(tokens, experts, dtype=torch.float32)

    def compare(routing: Routing) -> Sequence[Comparison]:
        # Which of two experts is chosen that score the same but for their last bits is no kernel's fault.
        _, weights = route_reference(logits, top_k)
        ranked = logits.softmax(-1).gather(1, routing.experts.long())
        slots = routing.experts.flatten()[routing.order.long()]
        counts = torch.bincount(routing.experts.flatten().long(), minlength=experts)
        distinct = routing.experts.sort(-1).values.diff(dim=-1) > 0
        return [
            Comparison(ranked, logits.softmax(-1).topk(top_k).values, 1e-5, 1e-7),
            exact(distinct, torch.ones_like(distinct)),
            Comparison(routing.weights, weights, 1e-5, 1e-7),
            exact(slots, slots.sort().values),
            exact(routing.offsets.diff(), counts),
        ]

    nbytes = logits.nbytes + tokens * top_k * 12
    return Trial(lambda: route(logits, top_k), compare, nbytes)


def _count_routed(inputs: Inputs, tokens: int, experts: int, top_k: int) -> Trial:
    """Of tokens of which every third is padding."""
    slots = torch.arange(tokens, device=inputs.device)
    slots[::3] = -1
    routing = route(inputs.normal(tokens, experts), top_k, probabilities=True, slots=slots)
    assert routing.probabilities is not None, "they were asked for"
    before = [inputs.integers(0, 9, *shape) for shape in ((), (experts,), (experts,))]
    counted, load, probability = before[0].clone(), before[1].clone(), before[2].double()

    def compare(_: None) -> list[Comparison]:
        assert routing.probabilities is not None, "they were asked for"
        real = int((slots >= 0).sum())
        return [
            exact(counted, before[0] + real),
            exact(load.sum(), before[1].sum() + top_k * real),
            exact(load, before[1] + routing.counts),
            Comparison(probability, before[2] + routing.probabilities.double().sum(0), 1e-12, 1e-12),
        ]

    nbytes = routing.probabilities.nbytes + 4 * (experts + 1) + 2 * 16 * experts
    return Trial(lambda: count_routed(routing, counted, load, probability), compare, nbytes)


EXPERTS: tuple[tuple[ExpertFormat, bool], ...] = (*((f, False) for f in FORMATS), ("fp8_blocks", True))
LARGE_MOE: tuple[tuple[ExpertFormat, int], ...] = (
    ("half", 16),
    ("fp8", 16),
    ("int4", 16),
    ("mxfp4", 16),
    ("fp8_blocks", 16),
    ("half", 512),
)

CASES = [
    Case("count_routed", "7 tokens, 3 of 20 experts", partial(_count_routed, tokens=7, experts=20, top_k=3), True),
    Case("count_routed", "512 tokens, 8 of 128 experts", partial(_count_routed, tokens=512, experts=128, top_k=8)),
    Case("moe_routing", "7 tokens, 3 of 20 experts", partial(_route, tokens=7, experts=20, top_k=3), True),
    *(
        Case(
            "moe_linear",
            f"{f}{' times fp8' if rounded else ''}, 9 tokens, 2 of 5 experts",
            partial(_moe, format=f, tokens=9, experts=5, top_k=2, shape=(70, 96), rounded=rounded),
            True,
        )
        for f, rounded in EXPERTS
    ),
    Case("moe_routing", "512 tokens, 8 of 128 experts", partial(_route, tokens=512, experts=128, top_k=8)),
    *(
        Case(
            "moe_linear",
            f"{f}, {t} tokens, 8 of 128 experts",
            partial(_moe, format=f, tokens=t, experts=128, top_k=8, shape=(1536, 2048)),
        )
        for f, t in LARGE_MOE
    ),
]
