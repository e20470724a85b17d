"""With which weights and batch sizes are the matrix products checked and timed?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from membound.kernels.bench import peers
from membound.kernels.bench.trial import Case, Comparison, Inputs, Math, Trial, exact, fp8_product, product
from membound.kernels.triton.activation import QuantizedRows
from membound.kernels.triton.linear_byte import (
    ByteFormat,
    ByteWeight,
    linear_byte,
    linear_byte_reference,
)
from membound.kernels.triton.linear_int4 import (
    Int4Weight,
    linear_int4,
    linear_int4_reference,
)
from membound.kernels.triton.linear_int8 import (
    Int8Weight,
    linear_int8,
    linear_int8_reference,
)
from membound.kernels.triton.linear_mxfp4 import (
    Mxfp4Weight,
    linear_mxfp4,
    linear_mxfp4_reference,
)
from membound.kernels.triton.linear_sparse import (
    SparseWeight,
    linear_sparse,
    linear_sparse_reference,
)
from membound.kernels.triton.linear_w4a8 import linear_w4a8, linear_w4a8_reference, step_of
from membound.kernels.triton.linear_w8a8 import (
    Fp8Blocks,
    linear_fp8_blocks,
    linear_fp8_blocks_reference,
    linear_w8a8,
    linear_w8a8_reference,
)
from membound.kernels.triton.moe_experts import FORMATS, ExpertFormat, ExpertWeights
from membound.kernels.triton.moe_linear import (
    moe_combine,
    moe_linear,
    moe_linear_bytes,
    moe_linear_reference,
)
from membound.kernels.triton.moe_routing import Routing, route, route_reference
from membound.kernels.triton.moved import rounded_bytes, weight_only_bytes
from membound.kernels.triton.round_rows import round_steps

Shape = tuple[int, int]  # n, k
DOWN_8B: Shape = (4096, 14336)  # Llama-3.1-8B's down projection
ODD: Shape = (130, 384)
PRODUCTS: dict[bool, Math] = {True: "fp8", False: "bf16"}  # of fp8 weights, by whether the inputs are rounded as well


def _int4(inputs: Inputs, m: int, shape: Shape, group: int, *, symmetric: bool) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = Int4Weight.quantize(inputs.normal(n, k), group, symmetric=symmetric)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_int4_reference(x, weight))]

    beside = {
        "cuBLAS bf16": partial(peers.dense, x, n),
        "tinygemm (torchao)": partial(peers.tinygemm_int4, x, n, group),
        "Marlin": partial(peers.marlin_int4, x, n, group),
    }
    return Trial(lambda: linear_int4(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _w4a8(inputs: Inputs, m: int, shape: Shape, group: int, *, symmetric: bool) -> Trial:
    (n, k), step = shape, step_of(group)
    x = round_steps(inputs.normal(m, k), step)
    weight = Int4Weight.quantize(inputs.normal(n, k), group, symmetric=symmetric)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_w4a8_reference(x, weight))]

    nbytes, flops = rounded_bytes(x, weight), 2 * m * n * k
    return Trial(lambda: linear_w4a8(x, weight, torch.bfloat16), compare, nbytes, flops, "int8")


def _int8(inputs: Inputs, m: int, shape: Shape, group: int) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = Int8Weight.quantize(inputs.normal(n, k), group)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_int8_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_int8(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _byte(inputs: Inputs, format: ByteFormat, m: int, shape: Shape) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = ByteWeight.quantize(inputs.normal(n, k), format)

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_byte_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_byte(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _mxfp4(inputs: Inputs, m: int, shape: Shape) -> Trial:
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = Mxfp4Weight.quantize(inputs.normal(n, k))

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_mxfp4_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_mxfp4(x, weight), compare, weight_only_bytes(m, weight), 2 * m * n * k, peers=beside)


def _sparse(inputs: Inputs, m: int, shape: Shape) -> Trial:
    """FLOPs are those of the values that are there: half of the dense product's."""
    (n, k), x = shape, inputs.normal(m, shape[1])
    weight = SparseWeight.prune(inputs.normal(n, k))

    def compare(y: Tensor) -> list[Comparison]:
        return [product(y, linear_sparse_reference(x, weight))]

    beside = {"cuBLAS bf16": partial(peers.dense, x, n)}
    return Trial(lambda: linear_sparse(x, weight), compare, weight_only_bytes(m, weight), m * n * k, peers=beside)


def _w8a8(inputs: Inputs, format: ByteFormat, m: int, shape: Shape, *, whole_step: bool = False) -> Trial:
    n, k = shape
    x = (QuantizedRows.of_step if whole_step else QuantizedRows.of)(inputs.normal(m, k), format)
    weight = ByteWeight.quantize(inputs.normal(n, k), format)

    def compare(y: Tensor) -> list[Comparison]:
        same = product if format == "int8" else fp8_product
        return [same(y, linear_w8a8_reference(x, weight))]

    peer = (
        {"torch._int_mm": partial(peers.int_mm, x.data, weight.data)}
        if format == "int8"
        else {"torch._scaled_mm": partial(peers.scaled_mm, x.data, x.scale.expand(m), weight.data, weight.scale)}
    )
    return Trial(
        lambda: linear_w8a8(x, weight, torch.bfloat16),
        compare,
        rounded_bytes(x, weight),
        2 * m * n * k,
        format,
        peer,
    )


def _fp8_blocks(inputs: Inputs, m: int, shape: Shape, *, rounded: bool = True) -> Trial:
    (n, k), halves = shape, inputs.normal(m, shape[1])
    x, weight = Fp8Blocks.quantize(halves, 1) if rounded else halves, Fp8Blocks.quantize(inputs.normal(n, k), 128)

    def compare(y: Tensor) -> list[Comparison]:
        same = fp8_product if rounded else product
        return [same(y, linear_fp8_blocks_reference(x, weight))]

    nbytes, multiplied = rounded_bytes(x, weight), PRODUCTS[rounded]
    return Trial(lambda: linear_fp8_blocks(x, weight, torch.bfloat16), compare, nbytes, 2 * m * n * k, multiplied)


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


BYTE_FORMATS: tuple[ByteFormat, ...] = ("int8", "fp8")
EXPERTS: tuple[tuple[ExpertFormat, bool], ...] = (*((f, False) for f in FORMATS), ("fp8_blocks", True))
LARGE_BYTE: tuple[tuple[ByteFormat, int], ...] = (
    ("int8", 1),
    ("int8", 16),
    ("int8", 64),
    ("int8", 512),
    ("fp8", 1),
    ("fp8", 16),
)
LARGE_MOE: tuple[tuple[ExpertFormat, int], ...] = (
    ("half", 16),
    ("fp8", 16),
    ("int4", 16),
    ("mxfp4", 16),
    ("fp8_blocks", 16),
    ("half", 512),
)

CASES = [
    *(
        Case("linear_int4", f"{words}, m {m}", partial(_int4, m=m, shape=ODD, group=128, symmetric=symmetric), True)
        for words, symmetric in (("symmetric", True), ("with zeros", False))
        for m in (3, 40)
    ),
    *(
        Case("linear_byte", f"{f}, m {m}", partial(_byte, format=f, m=m, shape=(130, 150)), True)
        for f in BYTE_FORMATS
        for m in (3, 40)
    ),
    *(
        Case(
            "linear_w4a8",
            f"group {group}, m {m}",
            partial(_w4a8, m=m, shape=(130, 768), group=group, symmetric=m == 3),
            True,
        )
        for group, m in ((64, 3), (128, 40), (256, 3))
    ),
    *(
        Case("linear_int8", f"group {group}, m {m}", partial(_int8, m=m, shape=ODD, group=group), True)
        for group, m in ((32, 3), (64, 40), (128, 5))
    ),
    Case("linear_mxfp4", "m 5", partial(_mxfp4, m=5, shape=ODD), True),
    Case("linear_sparse", "m 5", partial(_sparse, m=5, shape=(70, 300)), True),
    *(Case("linear_w8a8", f"{f}, m 5", partial(_w8a8, format=f, m=5, shape=(130, 150)), True) for f in BYTE_FORMATS),
    Case(
        "linear_w8a8",
        "fp8 with one scale, m 5",
        partial(_w8a8, format="fp8", m=5, shape=(130, 150), whole_step=True),
        True,
    ),
    Case("linear_fp8_blocks", "m 5", partial(_fp8_blocks, m=5, shape=(130, 300)), True),
    Case("linear_fp8_blocks", "of halves, m 5", partial(_fp8_blocks, m=5, shape=(130, 300), rounded=False), True),
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
    *(
        Case(
            "linear_int4",
            f"4096x14336, group 128, m {m}",
            partial(_int4, m=m, shape=DOWN_8B, group=128, symmetric=True),
        )
        for m in (1, 4, 16, 32, 64, 256)
    ),
    Case(
        "linear_int4",
        "4096x14336, group 128, zeros, m 16",
        partial(_int4, m=16, shape=DOWN_8B, group=128, symmetric=False),
    ),
    *(
        Case("linear_byte", f"{f} 4096x14336, m {m}", partial(_byte, format=f, m=m, shape=DOWN_8B))
        for f, m in LARGE_BYTE
    ),
    *(
        Case(
            "linear_w4a8",
            f"4096x14336, group 128, m {m}",
            partial(_w4a8, m=m, shape=DOWN_8B, group=128, symmetric=True),
        )
        for m in (1, 16, 64, 512)
    ),
    *(
        Case("linear_int8", f"4096x14336, group 32, m {m}", partial(_int8, m=m, shape=DOWN_8B, group=32))
        for m in (1, 16, 64)
    ),
    *(Case("linear_mxfp4", f"4096x14336, m {m}", partial(_mxfp4, m=m, shape=DOWN_8B)) for m in (1, 64)),
    *(Case("linear_sparse", f"4096x14336, m {m}", partial(_sparse, m=m, shape=DOWN_8B)) for m in (1, 64)),
    *(
        Case("linear_w8a8", f"{f} 4096x14336, m {m}", partial(_w8a8, format=f, m=m, shape=DOWN_8B))
        for f in BYTE_FORMATS
        for m in (32, 4096)
    ),
    *(Case("linear_fp8_blocks", f"4096x14336, m {m}", partial(_fp8_blocks, m=m, shape=DOWN_8B)) for m in (32, 4096)),
    *(
        Case(
            "linear_fp8_blocks", f"4096x14336 of halves, m {m}", partial(_fp8_blocks, m=m, shape=DOWN_8B, rounded=False)
        )
        for m in (1, 16)
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
