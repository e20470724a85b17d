"""With which shapes does serving launch products of weights, and of mixtures of experts?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from membound.kernels.triton.activation import QuantizedRows
from membound.kernels.triton.linear_byte import ByteFormat, ByteWeight, linear_byte
from membound.kernels.triton.linear_half import linear_half
from membound.kernels.triton.linear_int4 import PACK_ROWS, Int4Weight, linear_int4
from membound.kernels.triton.linear_int8 import PACK_ROWS as INT8_ROWS
from membound.kernels.triton.linear_int8 import WORD, Int8Weight, linear_int8
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight, linear_mxfp4
from membound.kernels.triton.linear_sparse import CHUNK, QUARTER, SparseWeight, linear_sparse
from membound.kernels.triton.linear_w4a8 import linear_w4a8, step_of
from membound.kernels.triton.linear_w8a8 import Fp8Blocks, linear_fp8_blocks, linear_w8a8
from membound.kernels.triton.meta import META, SEQUENCES, floats, of
from membound.kernels.triton.moe_experts import ExpertFormat, ExpertWeights
from membound.kernels.triton.moe_linear import moe_combine, moe_linear
from membound.kernels.triton.moe_routing import count_routed, route
from membound.kernels.triton.round_rows import QuantizedSteps


def _linear_half(m: int) -> None:
    linear_half(of(m, 14336), of(4096, 14336))


def _linear_int4(m: int, *, zero: bool, group: int = 128) -> None:
    n, k = 4096, 14336
    data = of(n // PACK_ROWS, k // group, PACK_ROWS, group // 4, dtype=torch.int16)
    zeros = of(-(-k // group // 8), n, 4, dtype=torch.uint8) if zero else None
    linear_int4(of(m, k), Int4Weight(data, of(k // group // 2, n, 2), zeros))


def _linear_w4a8(m: int, *, zero: bool = False, group: int = 128) -> None:
    n, k, step = 4096, 14336, step_of(group)
    data = of(n // PACK_ROWS, k // group, PACK_ROWS, group // 2, dtype=torch.uint8)
    zeros = of(-(-k // group // 8), n, 4, dtype=torch.uint8) if zero else None
    x = QuantizedSteps(of(m, k, dtype=torch.int8), of(m, k // step, dtype=torch.float32), step)
    weight = Int4Weight(data, of(k // group // 2, n, 2, dtype=torch.float16), zeros)
    linear_w4a8(x, weight, torch.bfloat16)


def _linear_int8(m: int, group: int) -> None:
    n, k = 4096, 14336
    data = of(n // INT8_ROWS, k // group, INT8_ROWS, group, dtype=torch.int8)
    linear_int8(of(m, k), Int8Weight(data, of(-(-k // group // WORD), n, WORD, dtype=torch.float16)))


def _linear_byte(format: ByteFormat, m: int) -> None:
    n, k = 4096, 14336
    data = of(n, k, dtype=torch.int8 if format == "int8" else torch.uint8)
    linear_byte(of(m, k), ByteWeight(format, data, of(n, dtype=torch.float32)))


def _linear_w8a8(format: ByteFormat, m: int, *, whole_step: bool = False) -> None:
    n, k = 4096, 14336
    data = of(n, k, dtype=torch.int8 if format == "int8" else torch.uint8)
    x = QuantizedRows.empty(format, m, k, META)
    x = QuantizedRows(format, x.data, of(1, dtype=torch.float32)) if whole_step else x
    linear_w8a8(x, ByteWeight(format, data, of(n, dtype=torch.float32)), torch.bfloat16)


def _linear_fp8_blocks(m: int, *, rounded: bool = True) -> None:
    n, k = 4096, 14336
    x = Fp8Blocks(of(m, k, dtype=torch.uint8), of(m, k // 128, dtype=torch.float32), 1)
    weight = Fp8Blocks(of(n, k, dtype=torch.uint8), of(n // 128, k // 128, dtype=torch.float32), 128)
    linear_fp8_blocks(x if rounded else of(m, k), weight, torch.bfloat16)


def _linear_sparse(m: int) -> None:
    n, k = 4096, 14336
    chunks = k // (4 * CHUNK)
    values, places = of(n, chunks, 4, 2, QUARTER), of(n, chunks, QUARTER, dtype=torch.int16)
    linear_sparse(of(m, k), SparseWeight(values, places, k))


def _linear_mxfp4(m: int) -> None:
    n, k = 4096, 14336
    tiles = n // PACK_ROWS
    data = of(tiles, k // 32, PACK_ROWS, 16, dtype=torch.uint8)
    scale = of(tiles, k // 128, PACK_ROWS, 4, dtype=torch.uint8)
    linear_mxfp4(of(m, k), Mxfp4Weight(data, scale, n))


def _route_in_groups() -> None:
    """DeepSeek-V3: 8 of 256 experts, of the 4 best of 8 groups."""
    logits, bias = of(SEQUENCES, 256), of(256, dtype=torch.float32)
    rule = partial(route, scoring="sigmoid", groups=8, group_top_k=4, group_score="best_two", probabilities=True)
    rule(logits, 8, bias=bias)


def _moe(format: ExpertFormat, tokens: int) -> None:
    """8 of 128 experts of width 768 and hidden 2048, as in Qwen3-30B-A3B."""
    experts, top_k, n, k = 128, 8, 1536, 2048
    routing, multiplied = route(of(tokens, experts), top_k), partial(moe_linear, shared_rows=True)
    if format == "mxfp4":
        packed = of(experts, n // PACK_ROWS, k // 32, PACK_ROWS, 16, dtype=torch.uint8)
        exponents = of(experts, n // PACK_ROWS, k // 128, PACK_ROWS, 4, dtype=torch.uint8)
        multiplied(of(tokens, k), ExpertWeights(format, packed, exponents, rows=n), routing)
        return
    if format == "int4":
        packed = of(experts, n // PACK_ROWS, k // 128, PACK_ROWS, 32, dtype=torch.int16)
        multiplied(of(tokens, k), ExpertWeights(format, packed, of(experts, k // 256, n, 2), rows=n), routing)
        return
    if format == "fp8_blocks":
        blocks = ExpertWeights(format, of(experts, n, k, dtype=torch.uint8), floats(experts, n // 128, k // 128))
        multiplied(Fp8Blocks(of(tokens, k, dtype=torch.uint8), floats(tokens, k // 128), 1), blocks, routing,
                   dtype=torch.bfloat16)  # fmt: skip
        multiplied(of(tokens, k), blocks, routing)
        return
    data = of(experts, n, k, dtype={"half": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}[format])
    scale = None if format == "half" else of(experts, n, dtype=torch.float32)
    slots = multiplied(of(tokens, k), ExpertWeights(format, data, scale), routing)
    moe_combine(slots, routing)


def _count_routed() -> None:
    counted, load = of(dtype=torch.int64), of(128, dtype=torch.int64)
    routing = route(of(SEQUENCES, 128), 8, probabilities=True, slots=of(SEQUENCES, dtype=torch.int64))
    count_routed(routing, counted, load, of(128, dtype=torch.float64))


# Widths are those of Llama-3.1-8B where no other model is named; the first of each kernel is its usual case.
LINEAR_CASES: dict[str, Callable[[], object]] = {
    "linear_half m 1": lambda: _linear_half(1),
    "linear_half m 8": lambda: _linear_half(8),
    "linear_int4 m 1": lambda: _linear_int4(1, zero=False),
    "linear_int4 m 16 with zeros": lambda: _linear_int4(16, zero=True),
    "linear_int4 m 32": lambda: _linear_int4(32, zero=False),
    "linear_int4 m 64": lambda: _linear_int4(64, zero=False),
    "linear_int4 groups of 256 m 16": lambda: _linear_int4(16, zero=True, group=256),
    "linear_int4 groups of 64 m 32": lambda: _linear_int4(32, zero=True, group=64),
    "linear_int4 m 512": lambda: _linear_int4(512, zero=False),
    "linear_int8 groups of 32 m 1": lambda: _linear_int8(1, 32),
    "linear_int8 groups of 64 m 16": lambda: _linear_int8(16, 64),
    "linear_int8 groups of 128 m 16": lambda: _linear_int8(16, 128),
    "linear_int8 groups of 128 m 64": lambda: _linear_int8(64, 128),
    "linear_int8 groups of 64 m 64": lambda: _linear_int8(64, 64),
    "linear_int8 groups of 32 m 64": lambda: _linear_int8(64, 32),
    "linear_byte int8 m 1": lambda: _linear_byte("int8", 1),
    "linear_byte fp8 m 16": lambda: _linear_byte("fp8", 16),
    "linear_byte int8 m 32": lambda: _linear_byte("int8", 32),
    "linear_byte int8 m 64": lambda: _linear_byte("int8", 64),
    "linear_byte fp8 m 512": lambda: _linear_byte("fp8", 512),
    "linear_w8a8 int8 m 16": lambda: _linear_w8a8("int8", 16),
    "linear_w8a8 fp8 m 64": lambda: _linear_w8a8("fp8", 64),
    "linear_w8a8 fp8 with one scale, m 16": lambda: _linear_w8a8("fp8", 16, whole_step=True),
    "linear_w8a8 int8 m 4096": lambda: _linear_w8a8("int8", 4096),
    "linear_w8a8 fp8 m 4096": lambda: _linear_w8a8("fp8", 4096),
    "linear_w4a8 m 1": lambda: _linear_w4a8(1),
    "linear_w4a8 m 16 with zeros": lambda: _linear_w4a8(16, zero=True),
    "linear_w4a8 m 32": lambda: _linear_w4a8(32),
    "linear_w4a8 m 64": lambda: _linear_w4a8(64),
    "linear_w4a8 m 512": lambda: _linear_w4a8(512),
    "linear_w4a8 groups of 256 m 16": lambda: _linear_w4a8(16, group=256),
    "linear_fp8_blocks m 16": lambda: _linear_fp8_blocks(16),
    "linear_fp8_blocks m 4096": lambda: _linear_fp8_blocks(4096),
    "linear_fp8_blocks of halves m 16": lambda: _linear_fp8_blocks(16, rounded=False),
    "linear_fp8_blocks of halves m 64": lambda: _linear_fp8_blocks(64, rounded=False),
    "linear_fp8_blocks of halves m 4096": lambda: _linear_fp8_blocks(4096, rounded=False),
    "linear_sparse m 1": lambda: _linear_sparse(1),
    "linear_sparse m 64": lambda: _linear_sparse(64),
    "linear_mxfp4 m 1": lambda: _linear_mxfp4(1),
    "linear_mxfp4 m 64": lambda: _linear_mxfp4(64),
    "moe_linear half": lambda: _moe("half", SEQUENCES),
    "moe_linear fp8": lambda: _moe("fp8", SEQUENCES),
    "moe_linear int4": lambda: _moe("int4", SEQUENCES),
    "moe_linear int4 8192 tokens": lambda: _moe("int4", 8192),
    "moe_linear fp8_blocks": lambda: _moe("fp8_blocks", SEQUENCES),
    "moe_linear fp8_blocks 512 tokens": lambda: _moe("fp8_blocks", 512),
    "moe_linear fp8_blocks 8192 tokens": lambda: _moe("fp8_blocks", 8192),
    "moe_linear mxfp4": lambda: _moe("mxfp4", SEQUENCES),
    "moe_linear mxfp4 512 tokens": lambda: _moe("mxfp4", 512),
    "moe_linear mxfp4 8192 tokens": lambda: _moe("mxfp4", 8192),
    "moe_linear half 512 tokens": lambda: _moe("half", 512),
    "moe_linear half 8192 tokens": lambda: _moe("half", 8192),
    "moe_routing in groups": _route_in_groups,
    "count_routed": _count_routed,
}
