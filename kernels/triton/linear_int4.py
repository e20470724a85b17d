"""How fast is a linear layer whose weights are 4-bit integers with a scale (and a zero point) a group?

Unpacked in registers: a nibble becomes bf16 by two bit operations and one subtraction, which also takes off the zero
point; the group's scale multiplies the sum of the group's products instead of each weight. Weights are the left operand
of the tensor cores, so a batch of up to 16 tokens fills their narrow side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.lang import dot, half_of, high_nibble, low_nibble
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k

PACK_ROWS = 64  # rows whose bytes of one group lie together, so that a program reads kilobytes in a row
GROUPS = (32, 64, 128, 256)
SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class Int4Weight:
    """A weight [n, k] as (q - zero) * scale with q from 0 to 15, a scale for each row and `group` columns.

    `data` is [ceil(n / 64), groups, 64, group / 2] uint8: byte j of a group holds its column j (low bits) and
    j + group / 2 (high bits). `scale` [ceil(groups / 2), n, 2] is bf16 or fp16; `zero` [ceil(groups / 8), n, 4] uint8
    holds two groups a byte, and without it all are 8. So a row's metadata come in words of 32 bits, the least that an
    asynchronous copy takes: a load that is not one would stall every step.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None

    @property
    def group(self) -> int:
        return 2 * self.data.shape[3]

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.shape[1], self.data.shape[1] * self.group

    @property
    def nbytes(self) -> int:
        n, k = self.shape
        return n * k // 2 + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @classmethod
    def pack(cls, q: Tensor, scale: Tensor, zero: Tensor | None = None) -> Int4Weight:
        """From q [n, k] (uint8, 0 to 15) and scale and zero [n, k / group]."""
        n, k = q.shape
        check.strided("scale", scale, [n, None], check.HALVES, q, free=2)
        group = k // max(scale.shape[1], 1)
        check.require(
            group in GROUPS and group * scale.shape[1] == k,
            "scale",
            f"{scale.shape[1]} groups of {k} columns are not groups of {', '.join(map(str, GROUPS))}",
        )
        check.strided("q", q, [n, k], [torch.uint8], free=2)
        if zero is not None:
            check.strided("zero", zero, scale.shape, [torch.uint8], q, free=2)
            low, high = _words(zero, 8).chunk(2, dim=-1)  # groups 0 to 3 and 4 to 7 of eight
            zero = (low | (high << 4)).contiguous()
        rows = -(-n // PACK_ROWS) * PACK_ROWS
        padded = torch.nn.functional.pad(q, (0, 0, 0, rows - n)).view(rows // PACK_ROWS, PACK_ROWS, k // group, group)
        low, high = padded.transpose(1, 2).chunk(2, dim=-1)
        return cls((low | (high << 4)).contiguous(), _words(scale, 2), zero)

    @classmethod
    def quantize(cls, weight: Tensor, group: int, *, symmetric: bool) -> Int4Weight:
        """Round to nearest: scale is amax / 7 or (max - min) / 15, in bf16, and q is of that rounded scale."""
        n, k = weight.shape
        check.require(k % group == 0, "group", f"{group} does not divide the {k} columns")
        w = weight.float().view(n, k // group, group)
        low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
        span = torch.maximum(high, -low) / 7 if symmetric else (high - low) / 15
        scale = span.clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
        zero = torch.full_like(scale, SYMMETRIC_ZERO, dtype=torch.float32) if symmetric else (-low / scale).round()
        zero = zero.clamp(0, 15)
        q = ((w / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
        packed_zero = None if symmetric else zero.to(torch.uint8)
        return cls.pack(q.view(n, k).to(torch.uint8), scale, packed_zero)

    def dequantized(self) -> Tensor:
        """The weight [n, k] in fp32."""
        n, k = self.shape
        q = torch.cat([self.data & 0xF, self.data >> 4], dim=-1).transpose(1, 2).reshape(-1, k)[:n]
        grouped = q.view(n, -1, self.group).float()
        groups = self.data.shape[1]
        scale = self.scale.transpose(0, 1).reshape(n, -1)[:, :groups, None].float()
        if self.zero is None:
            return ((grouped - SYMMETRIC_ZERO) * scale).view(n, k)
        zeros = torch.cat([self.zero & 0xF, self.zero >> 4], dim=-1).transpose(0, 1).reshape(n, -1)
        return ((grouped - zeros[:, :groups, None].float()) * scale).view(n, k)


def _words(by_group: Tensor, count: int) -> Tensor:
    """[n, groups] as [ceil(groups / count), n, count]."""
    groups = by_group.shape[1]
    padded = torch.nn.functional.pad(by_group, (0, -groups % count))
    return padded.unflatten(1, (-1, count)).transpose(0, 1).contiguous()


@triton.jit
def int4_products(acc, x_at, here, bytes_at, scale_at, zero_at, begin, end, columns, groups,
                  GROUP: tl.constexpr, PACK_N: tl.constexpr, SCALE_BF16: tl.constexpr, EVEN: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """acc [N, M] and the products of the pairs of groups begin to end.

    `bytes_at` [N, HALF] and `x_at` [M, HALF] point at the first group's, `scale_at` and `zero_at` [N] at the first
    word's; tokens that are not `here` [M] count as zero.
    """
    HALF: tl.constexpr = GROUP // 2
    SCALE: tl.constexpr = tl.bfloat16 if SCALE_BF16 else tl.float16
    nothing = tl.zeros(acc.shape, tl.float32)
    z = tl.full([acc.shape[0]], 8.0, tl.float32)
    # Stages that are named make Triton prefetch all loads, also the scales', which no product waits for.
    for pair in tl.range(begin, end, num_stages=STAGES):
        word = tl.load(scale_at + pair * columns)
        if zero_at is not None:
            eight = tl.load(zero_at + pair // 4 * columns)
        for i in tl.static_range(2):
            group = pair * 2 + i
            inside = here[:, None]
            if EVEN:
                byte = tl.load(bytes_at + group * (PACK_N * HALF))
            else:
                inside = inside & (group < groups)
                byte = tl.load(bytes_at + group * (PACK_N * HALF), mask=group < groups, other=0)
            if zero_at is not None:
                # Byte b of the word holds groups b and b + 4 of the eight.
                place = group % 8
                z = ((eight >> (place % 4 * 8 + place // 4 * 4)) & 0xF).to(tl.float32)
            x_low = tl.load(x_at + group * GROUP, mask=inside, other=0.0)
            x_high = tl.load(x_at + group * GROUP + HALF, mask=inside, other=0.0)
            part = dot(low_nibble(byte, x_low.dtype, z[:, None]), tl.trans(x_low), nothing)
            part = dot(high_nibble(byte, x_low.dtype, z[:, None]), tl.trans(x_high), part)
            acc += part * half_of(word, i, SCALE)[:, None]
    return acc


@triton.jit
def linear_int4_kernel(x, data, scale, zero, out, rows, columns, groups, x_stride, split_stride,
                       GROUP: tl.constexpr, PACK_N: tl.constexpr, SCALE_BF16: tl.constexpr, EVEN: tl.constexpr,
                       STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the pairs of groups)."""
    HALF: tl.constexpr = GROUP // 2
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, HALF)
    begin, end = split_range(tl.cdiv(groups, 2), tl.program_id(2))
    # Rows behind the last are read again from the last: no mask on the weights, and their results are not stored.
    row = tl.minimum(n, columns - 1)
    bytes_at = data + ((row // PACK_N).to(tl.int64) * groups * PACK_N + row % PACK_N)[:, None] * HALF + j[None, :]
    x_at = x + m[:, None].to(tl.int64) * x_stride + j[None, :]
    zero_at = zero
    if zero is not None:
        zero_at = zero + row
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = int4_products(acc, x_at, m < rows, bytes_at, scale + row, zero_at, begin, end, columns, groups,
                        GROUP, PACK_N, SCALE_BF16, EVEN, STAGES)  # fmt: skip
    store_tile(out, acc, m, n, rows, columns, split_stride)


def linear_int4(x: Tensor, weight: Int4Weight, *, splits: int | None = None, config: Config | None = None) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, summed in fp32: [m, n] in x's dtype."""
    n, k = weight.shape
    groups = weight.data.shape[1]
    pairs = -(-groups // 2)
    check.strided("x", x, [None, k], check.HALVES)
    check.tensor("weight.data", weight.data, [-(-n // PACK_ROWS), groups, PACK_ROWS, None], [torch.uint8], x)
    check.tensor("weight.scale", weight.scale, [pairs, n, 2], check.HALVES, x)
    if weight.zero is not None:
        check.tensor("weight.zero", weight.zero, [-(-groups // 8), n, 4], [torch.uint8], x)
    m = x.shape[0]
    config = config or configure("linear_int4", machine_for(x), m=m)

    def start(grid: tuple[int, int, int], out: Tensor) -> None:
        launch(
            linear_int4_kernel,
            grid,
            x,
            weight.data,
            weight.scale.view(torch.int32),
            None if weight.zero is None else weight.zero.view(torch.int32),
            out,
            m,
            n,
            groups,
            x.stride(0),
            m * n,
            config=config,
            GROUP=weight.group,
            PACK_N=PACK_ROWS,
            SCALE_BF16=weight.scale.dtype == torch.bfloat16,
            EVEN=groups % 2 == 0,
            STAGES=config.num_stages,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    shortest = max(1, 256 // weight.group)
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=pairs, shortest=shortest, splits=splits, start=start)


def linear_int4_reference(x: Tensor, weight: Int4Weight) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.dequantized().t()
