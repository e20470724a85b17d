"""How fast is a linear layer of which both sides take one byte: int8, or fp8 with a scale a row, or a scale a block?

The tensor cores multiply the bytes themselves, twice as fast as halves; int8 sums are exact. Where the hardware cannot
multiply fp8, it is widened to fp16, which holds every e4m3 exactly. Hopper's keep about 14 bits of a sum of products of
fp8, so after at most 128 of them it is added to one in fp32. That, and blocks of 128 x 128 weights and of 128 elements
of a token, are DeepSeek-V3's, 2024, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.activation import QuantizedRows
from membound.kernels.triton.lang import dot
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.linear_byte import ByteWeight
from membound.kernels.triton.overlap import ask_for, follow, steps_ahead
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k
from membound.kernels.triton.widen import fp8_to

BLOCK = 128


@triton.jit
def fp8_dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a @ b of e4m3 in uint8; only the products of this call are added up in fewer bits than fp32's."""
    if WIDEN == "fp8" or WIDEN == "pure":
        COLUMNS: tl.constexpr = a.shape[1]
        a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
        # Triton's default on sm_90 is 2**30 (backends/nvidia/compiler.py): never.
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=COLUMNS)
    else:
        acc = dot(fp8_to(a, tl.float16, WIDEN), fp8_to(b, tl.float16, WIDEN), acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def linear_w8a8_kernel(x, x_scale, data, scale, out, parts, done, rows, columns, k_size, size,
                       FORMAT: tl.constexpr, WIDEN: tl.constexpr, EVEN_K: tl.constexpr, BY_TOKEN: tl.constexpr,
                       AHEAD: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of k); x has a scale `BY_TOKEN`, or one."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    begin, end = split_range(tl.cdiv(k_size, BLOCK_K), tl.program_id(2))
    row = tl.minimum(n, columns - 1)
    token = tl.minimum(m, rows - 1)  # what lies behind the last row or token is not stored
    row_at = data + row.to(tl.int64) * k_size
    ask_for(row_at + begin * BLOCK_K, AHEAD * BLOCK_K, AHEAD, begin, end, OVERLAP)
    follow(OVERLAP)
    data_at = row_at[:, None] + k[None, :]
    x_at = x + token[:, None].to(tl.int64) * k_size + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if FORMAT == "int8" else tl.float32)
    for step in range(begin, end):
        start = step * BLOCK_K
        if EVEN_K:
            weight = tl.load(data_at + start)
            activation = tl.load(x_at + start)
        else:
            inside = k[None, :] < k_size - start
            weight = tl.load(data_at + start, mask=inside, other=0)
            activation = tl.load(x_at + start, mask=inside, other=0)
        if FORMAT == "int8":
            acc = tl.dot(weight, tl.trans(activation), acc, out_dtype=tl.int32)
        else:
            acc = fp8_dot(weight, tl.trans(activation), acc, WIDEN)
    result = acc.to(tl.float32) * tl.load(scale + row)[:, None] * tl.load(x_scale + token * BY_TOKEN)[None, :]
    store_tile(out, parts, done, result, m, n, rows, columns, size)


def linear_w8a8(
    x: QuantizedRows, weight: ByteWeight, dtype: torch.dtype, *, splits: int | None = None, config: Config | None = None
) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, both int8 or both fp8: [m, n] in `dtype`.

    x has a scale a token, or one for all of them.
    """
    check.require(x.format == weight.format, "x.format", f"is {x.format}, the weight's is {weight.format}")
    stored = torch.int8 if weight.format == "int8" else torch.uint8
    check.tensor("weight.data", weight.data, [None, None], [stored])
    n, k = weight.shape
    check.tensor("x.data", x.data, [None, k], [stored], weight.data)
    m = x.data.shape[0]
    by_token = x.scale.shape != (1,)
    check.tensor("x.scale", x.scale, [m if by_token else 1], [torch.float32], x.data)
    check.tensor("weight.scale", weight.scale, [n], [torch.float32], x.data)
    check.require(dtype in check.HALVES, "dtype", f"is {dtype}, should be torch.bfloat16 or torch.float16")
    machine = machine_for(x.data)
    config = config or configure("linear_w8a8", machine, m=m)
    block_k = config.tiles["BLOCK_K"]
    ahead = steps_ahead(weight.data, block_k, k)

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_w8a8_kernel,
            grid,
            x.data,
            x.scale,
            weight.data,
            weight.scale,
            *outputs,
            m,
            n,
            k,
            m * n,
            config=config,
            FORMAT=weight.format,
            WIDEN=machine.widening,
            EVEN_K=k % block_k == 0,
            BY_TOKEN=int(by_token),
            AHEAD=ahead,
        )

    tiles, steps = (config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]), -(-k // block_k)
    shortest = max(1, 512 // block_k)
    return with_split_k(x.data, n, dtype, tiles=tiles, steps=steps, shortest=shortest, splits=splits, start=start)


def linear_w8a8_reference(x: QuantizedRows, weight: ByteWeight) -> Tensor:
    """The same in fp32."""
    return x.dequantized() @ weight.dequantized().t()


@dataclass(frozen=True)
class Fp8Blocks:
    """e4m3 in uint8 `data` [rows, k] with an fp32 `scale` a block of `rows_a_block` (1 or 128) x 128 elements."""

    data: Tensor
    scale: Tensor
    rows_a_block: int

    @classmethod
    def quantize(cls, dense: Tensor, rows_a_block: int) -> Fp8Blocks:
        """Round to nearest; a block's largest element becomes 448."""
        rows, k = dense.shape
        high, wide = -(-rows // rows_a_block), -(-k // BLOCK)
        padded = torch.nn.functional.pad(dense.float(), (0, wide * BLOCK - k, 0, high * rows_a_block - rows))
        blocks = padded.view(high, rows_a_block, wide, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        scaled = blocks / torch.where(scale > 0, scale, 1.0)[:, None, :, None]
        data = scaled.view(high * rows_a_block, wide * BLOCK)[:rows, :k].to(torch.float8_e4m3fn)
        return cls(data.contiguous().view(torch.uint8), scale, rows_a_block)

    @property
    def shape(self) -> tuple[int, int]:
        rows, k = self.data.shape
        return rows, k

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        """[rows, k] in fp32."""
        rows, k = self.shape
        scale = self.scale.repeat_interleave(self.rows_a_block, 0).repeat_interleave(BLOCK, 1)[:rows, :k]
        return self.data.view(torch.float8_e4m3fn).float() * scale


@triton.jit
def fp8_blocks_products(acc, x_at, x_scale_at, data_at, scale_at, begin, end, k_size,
                        WIDEN: tl.constexpr, EVEN_K: tl.constexpr, SCALE_BLOCK: tl.constexpr,
                        STAGES: tl.constexpr):  # fmt: skip
    """acc [N, M] and the products of the blocks of columns begin to end.

    `data_at` [N, K] and `x_at` [M, K] point at the first block's, `scale_at` [N] and `x_scale_at` [M] at its scales;
    without the latter, x and the products are halves.
    """
    k = tl.arange(0, SCALE_BLOCK)
    nothing = tl.zeros(acc.shape, tl.float32)
    # Stages that are named make Triton prefetch all loads, also the scales', which no product waits for.
    for block in tl.range(begin, end, num_stages=STAGES):
        start = block * SCALE_BLOCK
        if EVEN_K:
            weight = tl.load(data_at + start)
            activation = tl.load(x_at + start)
        else:
            inside = k[None, :] < k_size - start
            weight = tl.load(data_at + start, mask=inside, other=0)
            activation = tl.load(x_at + start, mask=inside, other=0)
        w_scale = tl.load(scale_at + block)
        if x_scale_at is None:
            acc += dot(fp8_to(weight, activation.dtype, WIDEN), tl.trans(activation), nothing) * w_scale[:, None]
        else:
            a_scale = tl.load(x_scale_at + block)
            acc += fp8_dot(weight, tl.trans(activation), nothing, WIDEN) * w_scale[:, None] * a_scale[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def linear_fp8_blocks_kernel(x, x_scale, data, scale, out, parts, done, rows, columns, k_size, blocks, x_stride, size,
                             WIDEN: tl.constexpr, EVEN_K: tl.constexpr, AHEAD: tl.constexpr,
                             OVERLAP: tl.constexpr, SCALE_BLOCK: tl.constexpr, STAGES: tl.constexpr,
                             BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the blocks of k); without `x_scale`, x and the products are halves."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, SCALE_BLOCK)
    begin, end = split_range(blocks, tl.program_id(2))
    row = tl.minimum(n, columns - 1)
    token = tl.minimum(m, rows - 1)
    row_at = data + row.to(tl.int64) * k_size
    ask_for(row_at + begin * SCALE_BLOCK, AHEAD * SCALE_BLOCK, AHEAD, begin, end, OVERLAP)
    follow(OVERLAP)
    data_at = row_at[:, None] + k[None, :]
    x_at = x + token[:, None].to(tl.int64) * x_stride + k[None, :]
    x_scale_at = x_scale
    if x_scale is not None:
        x_scale_at = x_scale + token * blocks
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = fp8_blocks_products(acc, x_at, x_scale_at, data_at, scale + row // SCALE_BLOCK * blocks, begin, end, k_size,
                              WIDEN, EVEN_K, SCALE_BLOCK, STAGES)  # fmt: skip
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_fp8_blocks(
    x: Fp8Blocks | Tensor,
    weight: Fp8Blocks,
    dtype: torch.dtype,
    *,
    splits: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """x [m, k], in halves or with a scale for each token's 128 elements, times the weight [n, k] transposed: [m, n].

    The result is in `dtype`.
    """
    check.tensor("weight.data", weight.data, [None, None], [torch.uint8])
    n, k = weight.data.shape
    blocks = -(-k // BLOCK)
    check.require(weight.rows_a_block == BLOCK, "weight.rows_a_block", f"is {weight.rows_a_block}, should be {BLOCK}")
    check.tensor("weight.scale", weight.scale, [-(-n // BLOCK), blocks], [torch.float32], weight.data)
    if isinstance(x, Fp8Blocks):
        data, x_scale, m = x.data, x.scale, x.data.shape[0]
        check.tensor("x.data", data, [None, k], [torch.uint8], weight.data)
        check.require(x.rows_a_block == 1, "x.rows_a_block", f"is {x.rows_a_block}, should be 1")
        check.tensor("x.scale", x_scale, [m, blocks], [torch.float32], data)
    else:
        data, x_scale, m = x, None, x.shape[0]
        check.strided("x", data, [None, k], check.HALVES, weight.data)
    check.require(dtype in check.HALVES, "dtype", f"is {dtype}, should be torch.bfloat16 or torch.float16")
    machine = machine_for(data)
    config = config or configure("linear_fp8_blocks", machine, m=m)
    ahead = steps_ahead(weight.data, BLOCK, k)

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_fp8_blocks_kernel,
            grid,
            data,
            x_scale,
            weight.data,
            weight.scale,
            *outputs,
            m,
            n,
            k,
            blocks,
            data.stride(0),
            m * n,
            config=config,
            WIDEN=machine.widening,
            EVEN_K=k % BLOCK == 0,
            AHEAD=ahead,
            SCALE_BLOCK=BLOCK,
            STAGES=config.num_stages,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    return with_split_k(data, n, dtype, tiles=tiles, steps=blocks, shortest=4, splits=splits, start=start)


def linear_fp8_blocks_reference(x: Fp8Blocks | Tensor, weight: Fp8Blocks) -> Tensor:
    """The same in fp32."""
    return (x.dequantized() if isinstance(x, Fp8Blocks) else x.float()) @ weight.dequantized().t()
