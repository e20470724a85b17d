"""How fast is a linear layer whose weights are 4-bit integers with a scale (and a zero point) a group?

Unpacked in registers: two nibbles at a time become bf16 by a shift, a bit operation and a subtraction, which also takes
off the zero point; the group's scale multiplies the sum of the group's products instead of each weight. Weights are the
left operand of the tensor cores, so a batch of up to 16 tokens fills their narrow side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.lang import dot, half_of
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.overlap import ask_for, follow, steps_ahead
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k
from membound.kernels.triton.widen import nibbles

PACK_ROWS = 64  # rows whose bytes of one group lie together, so that a program reads kilobytes in a row
GROUPS = (32, 64, 128, 256)
FEWEST_OF_WORDS = 64  # a tensor core multiplies 16 columns
SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class Int4Weight:
    """A weight [n, k] as (q - zero) * scale with q from 0 to 15, a scale for each row and `group` columns.

    `data` is [ceil(n / 64), groups, 64, group / 4] int16: word j of a group holds its columns j, j + group / 4,
    j + group / 2 and j + 3 group / 4, from its low bits on. Or it is [.., group / 2] uint8 and a byte j holds columns j
    and j + group / 2: groups of 32, of which a quarter fills no tensor core, and what int8 multiplies.
    `scale` [ceil(groups / 2), n, 2] is bf16 or fp16; `zero` [ceil(groups / 8), n, 4] uint8 holds two groups a byte, and
    without it all are 8. So a row's metadata come in words of 32 bits, the least that an asynchronous copy takes: a
    load that is not one would stall every step.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None

    @property
    def group(self) -> int:
        return self.lanes * self.data.shape[3]

    @property
    def lanes(self) -> int:
        """Columns that share a word or a byte."""
        return 2 * self.data.itemsize

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.shape[1], self.data.shape[1] * self.group

    @property
    def nbytes(self) -> int:
        n, k = self.shape
        return n * k // 2 + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @classmethod
    def pack(cls, q: Tensor, scale: Tensor, zero: Tensor | None = None, *, lanes: int | None = None) -> Int4Weight:
        """From q [n, k] (uint8, 0 to 15) and scale and zero [n, k / group], in words of 4 `lanes` or bytes of 2."""
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
        parts = padded.transpose(1, 2).chunk(lanes or (4 if group >= FEWEST_OF_WORDS else 2), dim=-1)
        data = sum((part.short() << 4 * lane for lane, part in enumerate(parts)), torch.zeros_like(parts[0]).short())
        return cls((data if len(parts) == 4 else data.to(torch.uint8)).contiguous(), _words(scale, 2), zero)

    @classmethod
    def quantize(cls, weight: Tensor, group: int, *, symmetric: bool, lanes: int | None = None) -> Int4Weight:
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
        return cls.pack(q.view(n, k).to(torch.uint8), scale, packed_zero, lanes=lanes)

    def dequantized(self) -> Tensor:
        """The weight [n, k] in fp32."""
        n, k = self.shape
        parts = [(self.data >> 4 * lane) & 0xF for lane in range(self.lanes)]
        q = torch.cat(parts, dim=-1).transpose(1, 2).reshape(-1, k)[:n]
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
def int4_products(acc, x_at, here, words_at, scale_at, zero_at, begin, end, columns, groups,
                  GROUP: tl.constexpr, LANES: tl.constexpr, PACK_N: tl.constexpr, SCALE_BF16: tl.constexpr,
                  EVEN: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """acc [N, M] and the products of the pairs of groups begin to end.

    `words_at` [N, PART] and `x_at` [M, PART] point at the first group's, `scale_at` and `zero_at` [N] at the first
    word's; tokens that are not `here` [M] count as zero.
    """
    PART: tl.constexpr = GROUP // LANES
    SCALE: tl.constexpr = tl.bfloat16 if SCALE_BF16 else tl.float16
    nothing = tl.zeros(acc.shape, tl.float32)
    # Stages that are named make Triton prefetch all loads, also the scales', which no product waits for.
    for pair in tl.range(begin, end, num_stages=STAGES):
        scales = tl.load(scale_at + pair * columns)
        if zero_at is not None:
            eight = tl.load(zero_at + pair // 4 * columns)
        for i in tl.static_range(2):
            group = pair * 2 + i
            inside = here[:, None]
            if EVEN:
                word = tl.load(words_at + group * (PACK_N * PART))
            else:
                inside = inside & (group < groups)
                word = tl.load(words_at + group * (PACK_N * PART), mask=group < groups, other=0)
            part = nothing
            total = tl.zeros([acc.shape[1], PART], tl.float32)
            for lane in tl.static_range(LANES):
                token = tl.load(x_at + group * GROUP + lane * PART, mask=inside, other=0.0)
                part = dot(nibbles(word, lane, token.dtype, 8.0, WIDEN), tl.trans(token), part)
                if zero_at is not None:
                    total += token.to(tl.float32)
            if zero_at is not None:
                # Byte b of the word holds groups b and b + 4 of the eight. A row's zero is taken off its product, by
                # the sum of what it was multiplied with: taken off each weight it costs as much as the weights do.
                place = group % 8
                zero = ((eight >> (place % 4 * 8 + place // 4 * 4)) & 0xF).to(tl.float32)
                part -= tl.sum(total, 1)[None, :] * (zero - 8.0)[:, None]
            acc += part * half_of(scales, i, SCALE)[:, None]
    return acc


@triton.jit(do_not_specialize=["rows"])
def linear_int4_kernel(x, data, scale, zero, out, parts, done, rows, columns, groups, x_stride, size,
                       GROUP: tl.constexpr, LANES: tl.constexpr, PACK_N: tl.constexpr, SCALE_BF16: tl.constexpr,
                       EVEN: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
                       OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the pairs of groups)."""
    PART: tl.constexpr = GROUP // LANES
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, PART)
    begin, end = split_range(tl.cdiv(groups, 2), tl.program_id(2))
    # Rows behind the last are read again from the last: no mask on the weights, and their results are not stored.
    row = tl.minimum(n, columns - 1)
    tile = (row // PACK_N).to(tl.int64) * groups * PACK_N
    # The words of a tile's rows lie together, group by group: each row asks for as much of them.
    MINE: tl.constexpr = 2 * AHEAD * PART
    ask_for(data + (tile + begin * (2 * PACK_N)) * PART + row % PACK_N * MINE,
            MINE * (data.dtype.element_ty.primitive_bitwidth // 8), AHEAD, begin, end, OVERLAP)  # fmt: skip
    follow(OVERLAP)
    words_at = data + (tile + row % PACK_N)[:, None] * PART + j[None, :]
    x_at = x + m[:, None].to(tl.int64) * x_stride + j[None, :]
    zero_at = zero
    if zero is not None:
        zero_at = zero + row
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = int4_products(acc, x_at, m < rows, words_at, scale + row, zero_at, begin, end, columns, groups,
                        GROUP, LANES, PACK_N, SCALE_BF16, EVEN, WIDEN, STAGES)  # fmt: skip
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_int4(x: Tensor, weight: Int4Weight, *, splits: int | None = None, config: Config | None = None) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, summed in fp32: [m, n] in x's dtype."""
    n, k = weight.shape
    groups = weight.data.shape[1]
    pairs = -(-groups // 2)
    check.strided("x", x, [None, k], check.HALVES)
    stored = torch.int16 if weight.group >= FEWEST_OF_WORDS else torch.uint8
    check.tensor("weight.data", weight.data, [-(-n // PACK_ROWS), groups, PACK_ROWS, None], [stored], x)
    check.tensor("weight.scale", weight.scale, [pairs, n, 2], check.HALVES, x)
    if weight.zero is not None:
        check.tensor("weight.zero", weight.zero, [-(-groups // 8), n, 4], [torch.uint8], x)
    m = x.shape[0]
    machine = machine_for(x)
    config = config or configure("linear_int4", machine, m=m, group=weight.group)
    ahead = steps_ahead(weight.data, weight.group, k // 2)  # a pair of groups of 4 bits

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_int4_kernel,
            grid,
            x,
            weight.data,
            weight.scale.view(torch.int32),
            None if weight.zero is None else weight.zero.view(torch.int32),
            *outputs,
            m,
            n,
            groups,
            x.stride(0),
            m * n,
            config=config,
            GROUP=weight.group,
            LANES=weight.lanes,
            PACK_N=PACK_ROWS,
            SCALE_BF16=weight.scale.dtype == torch.bfloat16,
            EVEN=groups % 2 == 0,
            WIDEN=machine.widening,
            STAGES=config.num_stages,
            AHEAD=ahead,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    shortest = max(1, 256 // weight.group)
    return with_split_k(
        x, n, x.dtype, tiles=tiles, steps=pairs, shortest=shortest, splits=splits, start=start, at_once=config.at_once
    )


def linear_int4_reference(x: Tensor, weight: Int4Weight) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.dequantized().t()
