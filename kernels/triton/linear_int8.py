"""How fast is a linear layer whose weights are 8-bit integers with a scale for each group of a row, as GGUF's Q8_0?

As with int4 the bytes of 64 rows lie together, and the group's scale multiplies the sum of the group's products. Four
groups' scales are one word, so that even of groups of 32 a step reads kilobytes.
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
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k
from membound.kernels.triton.widen import int8_to

PACK_ROWS = 64  # rows whose bytes of one group lie together
GROUPS = (32, 64, 128)
WORD = 4  # groups whose scales lie together


@dataclass(frozen=True)
class Int8Weight:
    """A weight [n, k] as q * scale, with a scale for each row and `group` columns.

    `data` is [ceil(n / 64), groups, 64, group] int8, `scale` [ceil(groups / 4), n, 4] fp16.
    """

    data: Tensor
    scale: Tensor

    @property
    def group(self) -> int:
        return self.data.shape[3]

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.shape[1], self.data.shape[1] * self.group

    @property
    def nbytes(self) -> int:
        n, k = self.shape
        return n * k + self.scale.nbytes

    @classmethod
    def pack(cls, q: Tensor, scale: Tensor) -> Int8Weight:
        """From q [n, k] (int8) and scale [n, k / group] (fp16)."""
        check.strided("q", q, [None, None], [torch.int8], free=2)
        n, k = q.shape
        check.strided("scale", scale, [n, None], [torch.float16], q, free=2)
        groups = scale.shape[1]
        group = k // max(groups, 1)
        check.require(
            group in GROUPS and group * groups == k,
            "scale",
            f"{groups} groups of {k} columns are not groups of {', '.join(map(str, GROUPS))}",
        )
        padded = torch.nn.functional.pad(q, (0, 0, 0, -n % PACK_ROWS)).view(-1, PACK_ROWS, groups, group)
        words = torch.nn.functional.pad(scale, (0, -groups % WORD)).unflatten(1, (-1, WORD)).transpose(0, 1)
        return cls(padded.transpose(1, 2).contiguous(), words.contiguous())

    @classmethod
    def quantize(cls, weight: Tensor, group: int) -> Int8Weight:
        """Round to nearest; a group's largest weight becomes 127, and q is of the scale in fp16."""
        n, k = weight.shape
        check.require(group > 0 and k % group == 0, "group", f"{group} does not divide the {k} columns")
        groups = weight.float().view(n, k // group, group)
        scale = (groups.abs().amax(-1) / 127).half()
        divisor = torch.where(scale > 0, scale.float(), 1.0)[..., None]
        return cls.pack((groups / divisor).round().clamp(-127, 127).to(torch.int8).view(n, k), scale)

    def dequantized(self) -> Tensor:
        """The weight [n, k] in fp32."""
        n, k = self.shape
        groups = self.data.shape[1]
        q = self.data.transpose(1, 2).reshape(-1, groups, self.group)[:n].float()
        scale = self.scale.transpose(0, 1).reshape(n, -1)[:, :groups, None].float()
        return (q * scale).reshape(n, k)


@triton.jit(do_not_specialize=["rows"])
def linear_int8_kernel(x, data, scale, out, parts, done, rows, columns, groups, x_stride, size,
                       GROUP: tl.constexpr, PACK_N: tl.constexpr, IN_WORD: tl.constexpr, EVEN: tl.constexpr,
                       WIDEN: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the words of groups)."""
    follow(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, GROUP)
    begin, end = split_range(tl.cdiv(groups, IN_WORD), tl.program_id(2))
    row = tl.minimum(n, columns - 1)  # rows behind the last are read again from the last and not stored
    bytes_at = data + ((row // PACK_N).to(tl.int64) * groups * PACK_N + row % PACK_N)[:, None] * GROUP + j[None, :]
    x_at = x + m[:, None].to(tl.int64) * x_stride + j[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    nothing = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Stages that are named make Triton prefetch all loads, also the scales', which no product waits for.
    for step in tl.range(begin, end, num_stages=STAGES):
        word = tl.load(scale + step * columns + row)
        for i in tl.static_range(IN_WORD):
            group = step * IN_WORD + i
            inside = m[:, None] < rows
            if EVEN:
                byte = tl.load(bytes_at + group * (PACK_N * GROUP))
            else:
                inside = inside & (group < groups)
                byte = tl.load(bytes_at + group * (PACK_N * GROUP), mask=group < groups, other=0)
            token = tl.load(x_at + group * GROUP, mask=inside, other=0.0)
            part = dot(int8_to(byte, token.dtype, WIDEN), tl.trans(token), nothing)
            acc += part * half_of(word, i, tl.float16)[:, None]
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_int8(x: Tensor, weight: Int8Weight, *, splits: int | None = None, config: Config | None = None) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, summed in fp32: [m, n] in x's dtype."""
    check.require(
        weight.data.dim() == 4, "weight.data", f"shape is {list(weight.data.shape)}, should have 4 dimensions"
    )
    check.require(weight.scale.dim() == 3, "weight.scale", f"shape is {list(weight.scale.shape)}, should be of words")
    n, k = weight.shape
    groups = weight.data.shape[1]
    words = -(-groups // WORD)
    check.require(weight.group in GROUPS, "weight.data", f"has groups of {weight.group}, should be of {GROUPS}")
    check.strided("x", x, [None, k], check.HALVES)
    check.tensor("weight.data", weight.data, [-(-n // PACK_ROWS), groups, PACK_ROWS, None], [torch.int8], x)
    check.tensor("weight.scale", weight.scale, [words, n, WORD], [torch.float16], x)
    m = x.shape[0]
    machine = machine_for(x)
    config = config or configure("linear_int8", machine, m=m, group=weight.group)

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_int8_kernel,
            grid,
            x,
            weight.data,
            weight.scale.view(torch.int64),
            *outputs,
            m,
            n,
            groups,
            x.stride(0),
            m * n,
            config=config,
            GROUP=weight.group,
            PACK_N=PACK_ROWS,
            IN_WORD=WORD,
            EVEN=groups % WORD == 0,
            WIDEN=machine.widening,
            STAGES=config.num_stages,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    shortest = max(1, 256 // (WORD * weight.group))
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=words, shortest=shortest, splits=splits, start=start)


def linear_int8_reference(x: Tensor, weight: Int8Weight) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.dequantized().t()
