"""How fast is a linear layer in the OCP microscaling format MXFP4: e2m1 numbers, a power of two for each 32 of them?

As with int4 a byte holds two columns, which lie half a group apart. Times its scale a number is still a bf16, exactly,
so one sum runs over all groups. Several groups a step keep the tensor cores' pipeline full. Source: OCP Microscaling
Formats (MX) v1.0, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.lang import dot, power_of_two
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k
from membound.kernels.triton.widen import e2m1_to_bf16

GROUP = 32
PACK_ROWS = 64  # rows whose bytes of one group lie together, so that a program reads kilobytes in a row
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Mxfp4Weight:
    """A weight [n, k] in MXFP4.

    `data` is [ceil(n / 64), k / 32, 64, 16] uint8: byte j of a group holds its column j (low bits) and j + 16 (high
    bits). `scale` [ceil(n / 64), ceil(k / 128), 64, 4] uint8 is e8m0, 2**(scale - 127); four groups' lie together since
    an asynchronous copy takes at least 4 bytes.
    """

    data: Tensor
    scale: Tensor
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.data.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        n, k = self.shape
        return n * k // 2 + n * k // GROUP

    @classmethod
    def pack(cls, code: Tensor, scale: Tensor) -> Mxfp4Weight:
        """From e2m1 codes [n, k] (uint8, 0 to 15) and e8m0 scales [n, k / 32]."""
        n, k = code.shape
        check.require(k % GROUP == 0, "code", f"{k} columns are not groups of {GROUP}")
        check.strided("code", code, [n, k], [torch.uint8], free=2)
        check.strided("scale", scale, [n, k // GROUP], [torch.uint8], code, free=2)
        tiles = -(-n // PACK_ROWS)
        rows = (0, 0, 0, tiles * PACK_ROWS - n)
        codes = torch.nn.functional.pad(code, rows).view(tiles, PACK_ROWS, k // GROUP, GROUP).transpose(1, 2)
        low, high = codes.chunk(2, dim=-1)
        padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4, *rows[2:]))
        scales = padded.view(tiles, PACK_ROWS, -1, 4).transpose(1, 2)
        return cls((low | (high << 4)).contiguous(), scales.contiguous(), n)

    @classmethod
    def quantize(cls, weight: Tensor) -> Mxfp4Weight:
        """Section 6.3 of the source: the scale's exponent is the largest element's less 2; elements to the nearest."""
        n, k = weight.shape
        check.require(k % GROUP == 0, "weight", f"{k} columns are not groups of {GROUP}")
        groups = weight.float().view(n, k // GROUP, GROUP)
        _, exponent = torch.frexp(groups.abs().amax(-1))  # amax = mantissa * 2**exponent, mantissa from 0.5
        scale = (exponent - 1 - 2).clamp(-127, 127)
        scaled = (groups / torch.exp2(scale.float())[..., None]).clamp(-E2M1[-1], E2M1[-1])
        midpoints = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)], device=weight.device)
        code = torch.bucketize(scaled.abs(), midpoints) + 8 * (scaled < 0)
        return cls.pack(code.view(n, k).to(torch.uint8), (scale + 127).to(torch.uint8))

    def dequantized(self) -> Tensor:
        """The weight [n, k] in fp32."""
        code = torch.cat([self.data & 0xF, self.data >> 4], dim=-1).long()
        numbers = torch.tensor([*E2M1, *(-x for x in E2M1)], device=code.device)[code]
        scale = torch.exp2(self.scale.float() - 127).transpose(2, 3).flatten(1, 2)[:, : code.shape[1]]
        scaled = numbers * scale[..., None]
        return scaled.transpose(1, 2).reshape(-1, self.shape[1])[: self.rows]


@triton.jit(do_not_specialize=["rows"])
def linear_mxfp4_kernel(x, data, scale, out, parts, done, rows, columns, groups, x_stride, size,
                        SIZE: tl.constexpr, PACK_N: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
                        STEP: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the steps of STEP groups)."""
    follow(OVERLAP)
    HALF: tl.constexpr = SIZE // 2
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, HALF)
    begin, end = split_range(tl.cdiv(groups, STEP), tl.program_id(2))
    row = tl.minimum(n, columns - 1)  # rows behind the last are read again from the last and not stored
    tile = (row // PACK_N).to(tl.int64)
    packed = tile * groups * PACK_N + row % PACK_N
    scale_at = scale + tile * tl.cdiv(groups, 4) * PACK_N + row % PACK_N
    x_at = x + m[:, None].to(tl.int64) * x_stride + j[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    nothing = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Stages that are named make Triton prefetch all loads, also the scales', which no product waits for.
    for step in tl.range(begin, end, num_stages=STAGES):
        four = tl.load(scale_at + step * STEP // 4 * PACK_N)
        for i in tl.static_range(STEP):
            group = step * STEP + i
            here = group < groups
            at = packed + group * PACK_N
            byte = tl.load(data + at[:, None] * HALF + j[None, :], mask=here, other=0)
            scales = power_of_two((four >> (group % 4 * 8)) & 0xFF)
            inside = (m[:, None] < rows) & here
            x_low = tl.load(x_at + group * SIZE, mask=inside, other=0.0)
            x_high = tl.load(x_at + group * SIZE + HALF, mask=inside, other=0.0)
            part = dot(e2m1_to_bf16(byte, False, WIDEN), tl.trans(x_low), nothing)
            acc += dot(e2m1_to_bf16(byte, True, WIDEN), tl.trans(x_high), part) * scales[:, None]
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_mxfp4(x: Tensor, weight: Mxfp4Weight, *, splits: int | None = None, config: Config | None = None) -> Tensor:
    """x [m, k] (bf16) times the weight [n, k] transposed, summed in fp32: [m, n] in bf16."""
    n, k = weight.shape
    groups, tiles_n = k // GROUP, -(-n // PACK_ROWS)
    check.strided("x", x, [None, k], [torch.bfloat16])
    check.tensor("weight.data", weight.data, [tiles_n, groups, PACK_ROWS, GROUP // 2], [torch.uint8], x)
    check.tensor("weight.scale", weight.scale, [tiles_n, -(-groups // 4), PACK_ROWS, 4], [torch.uint8], x)
    m = x.shape[0]
    machine = machine_for(x)
    config = config or configure("linear_mxfp4", machine, m=m)

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_mxfp4_kernel,
            grid,
            x,
            weight.data,
            weight.scale.view(torch.int32),
            *outputs,
            m,
            n,
            groups,
            x.stride(0),
            m * n,
            config=config,
            SIZE=GROUP,
            PACK_N=PACK_ROWS,
            WIDEN=machine.widening,
            STAGES=config.num_stages,
        )

    tiles, steps = (config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]), -(-groups // config.tiles["STEP"])
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=steps, shortest=8, splits=splits, start=start)


def linear_mxfp4_reference(x: Tensor, weight: Mxfp4Weight) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.dequantized().t()
