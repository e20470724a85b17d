"""How fast is a linear layer of 4-bit weights and 8-bit activations, multiplied as integers?

Weights lie as `linear_int4` has them, whose nibbles less their zero are int8; a token's numbers have a scale for as
many of them as share a group of weights, at most 128. A group's sums are exact, and both scales multiply them once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.lang import half_of
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.linear_int4 import PACK_ROWS, Int4Weight
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.round_rows import QuantizedSteps
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k

GROUPS = (64, 128, 256)  # of weights; half a group fills the tensor cores' 32 columns
LARGEST_STEP = 128


def step_of(group: int) -> int:
    """The elements of a token that share a scale."""
    return min(group, LARGEST_STEP)


@triton.jit(do_not_specialize=["rows"])
def linear_w4a8_kernel(x, x_scale, data, scale, zero, out, parts, done, rows, columns, groups, steps, k_size, size,
                       GROUP: tl.constexpr, STEP: tl.constexpr, PACK_N: tl.constexpr, SCALE_BF16: tl.constexpr,
                       EVEN: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the pairs of groups)."""
    follow(OVERLAP)
    HALF: tl.constexpr = GROUP // 2
    SCALE: tl.constexpr = tl.bfloat16 if SCALE_BF16 else tl.float16
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, HALF)
    begin, end = split_range(tl.cdiv(groups, 2), tl.program_id(2))
    row = tl.minimum(n, columns - 1)  # what lies behind the last row or token is not stored
    token = tl.minimum(m, rows - 1)
    bytes_at = data + ((row // PACK_N).to(tl.int64) * groups * PACK_N + row % PACK_N)[:, None] * HALF + j[None, :]
    x_at = x + token[:, None].to(tl.int64) * k_size + j[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    nothing = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    z = tl.full([BLOCK_N], 8, tl.int8)
    # Stages that are named make Triton prefetch all loads, also the scales', which no product waits for.
    for pair in tl.range(begin, end, num_stages=STAGES):
        word = tl.load(scale + pair * columns + row)
        if zero is not None:
            eight = tl.load(zero + pair // 4 * columns + row)
        for i in tl.static_range(2):
            group = pair * 2 + i
            step_at = x_scale + token * steps + group * (GROUP // STEP)
            if EVEN:
                byte = tl.load(bytes_at + group * (PACK_N * HALF))
                x_low = tl.load(x_at + group * GROUP)
                x_high = tl.load(x_at + group * GROUP + HALF)
                low_scale = tl.load(step_at)
            else:
                byte = tl.load(bytes_at + group * (PACK_N * HALF), mask=group < groups, other=0)
                x_low = tl.load(x_at + group * GROUP, mask=group < groups, other=0)
                x_high = tl.load(x_at + group * GROUP + HALF, mask=group < groups, other=0)
                low_scale = tl.load(step_at, mask=group < groups, other=0.0)
            if zero is not None:
                # Byte b of the word holds groups b and b + 4 of the eight.
                place = group % 8
                z = ((eight >> (place % 4 * 8 + place // 4 * 4)) & 0xF).to(tl.int8)
            low = (byte & 0xF).to(tl.int8) - z[:, None]
            high = (byte >> 4).to(tl.int8) - z[:, None]
            part = tl.dot(low, tl.trans(x_low), nothing, out_dtype=tl.int32)
            of_group = half_of(word, i, SCALE)[:, None]
            if STEP == GROUP:
                part = tl.dot(high, tl.trans(x_high), part, out_dtype=tl.int32)
                acc += part.to(tl.float32) * of_group * low_scale[None, :]
            else:
                high_scale = tl.load(step_at + 1) if EVEN else tl.load(step_at + 1, mask=group < groups, other=0.0)
                rest = tl.dot(high, tl.trans(x_high), nothing, out_dtype=tl.int32)
                both = part.to(tl.float32) * low_scale[None, :] + rest.to(tl.float32) * high_scale[None, :]
                acc += both * of_group
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_w4a8(
    x: QuantizedSteps, weight: Int4Weight, dtype: torch.dtype, *, splits: int | None = None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """x [m, k] times the weight [n, k] transposed: [m, n] in `dtype`."""
    n, k = weight.shape
    groups = weight.data.shape[1]
    pairs, step = -(-groups // 2), step_of(weight.group)
    check.require(weight.group in GROUPS, "weight", f"has groups of {weight.group}, should be of {GROUPS}")
    check.tensor("x.data", x.data, [None, k], [torch.int8])
    m = x.data.shape[0]
    check.require(x.step == step, "x.step", f"is {x.step}, for groups of {weight.group} it should be {step}")
    check.tensor("x.scale", x.scale, [m, k // step], [torch.float32], x.data)
    check.tensor("weight.data", weight.data, [-(-n // PACK_ROWS), groups, PACK_ROWS, None], [torch.uint8], x.data)
    check.tensor("weight.scale", weight.scale, [pairs, n, 2], check.HALVES, x.data)
    if weight.zero is not None:
        check.tensor("weight.zero", weight.zero, [-(-groups // 8), n, 4], [torch.uint8], x.data)
    check.require(dtype in check.HALVES, "dtype", f"is {dtype}, should be torch.bfloat16 or torch.float16")
    config = config or configure("linear_w4a8", machine_for(x.data), m=m)

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_w4a8_kernel,
            grid,
            x.data,
            x.scale,
            weight.data,
            weight.scale.view(torch.int32),
            None if weight.zero is None else weight.zero.view(torch.int32),
            *outputs,
            m,
            n,
            groups,
            k // step,
            k,
            m * n,
            config=config,
            GROUP=weight.group,
            STEP=step,
            PACK_N=PACK_ROWS,
            SCALE_BF16=weight.scale.dtype == torch.bfloat16,
            EVEN=groups % 2 == 0,
            STAGES=config.num_stages,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    shortest = max(1, 256 // weight.group)
    return with_split_k(x.data, n, dtype, tiles=tiles, steps=pairs, shortest=shortest, splits=splits, start=start)


def linear_w4a8_reference(x: QuantizedSteps, weight: Int4Weight) -> Tensor:
    """The same in fp32."""
    return x.dequantized() @ weight.dequantized().t()
