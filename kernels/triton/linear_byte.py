"""How fast is a linear layer whose weights take one byte each: int8 or fp8 (e4m3), with a scale a row?

They are widened in registers, exactly, to the activations' type; the row's scale multiplies the sum once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.overlap import steps_ahead
from membound.kernels.triton.row_products import row_products
from membound.kernels.triton.split_k import store_tile, with_split_k

ByteFormat = Literal["int8", "fp8"]
LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True)
class ByteWeight:
    """A weight [n, k] as data * scale[row]; `data` [n, k] is int8, or e4m3 in uint8; `scale` [n] is fp32."""

    format: ByteFormat
    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.data.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    @classmethod
    def quantize(cls, weight: Tensor, format: ByteFormat) -> ByteWeight:
        """Round to nearest; a row's largest weight becomes the format's largest number."""
        w = weight.float()
        scale = (w.abs().amax(-1) / LARGEST[format]).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = w / scale[:, None]
        if format == "int8":
            return cls(format, scaled.round().to(torch.int8), scale)
        return cls(format, scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale)

    def dequantized(self) -> Tensor:
        """The weight [n, k] in fp32."""
        data = self.data if self.format == "int8" else self.data.view(torch.float8_e4m3fn)
        return data.float() * self.scale[:, None]


@triton.jit(do_not_specialize=["rows"])
def linear_byte_kernel(x, data, scale, out, parts, done, rows, columns, k_size, x_stride, size,
                       FORMAT: tl.constexpr, WIDEN: tl.constexpr, EVEN_K: tl.constexpr, AHEAD: tl.constexpr,
                       OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of k)."""
    acc, m, n = row_products(x, data, rows, columns, k_size, x_stride, FORMAT, WIDEN, EVEN_K, AHEAD, OVERLAP,
                             BLOCK_N, BLOCK_M, BLOCK_K)  # fmt: skip
    acc *= tl.load(scale + tl.minimum(n, columns - 1))[:, None]
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_byte(x: Tensor, weight: ByteWeight, *, splits: int | None = None, config: Config | None = None) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, summed in fp32: [m, n] in x's dtype."""
    check.require(weight.format in LARGEST, "weight.format", f"is {weight.format}, should be int8 or fp8")
    check.tensor("weight.data", weight.data, [None, None], [torch.int8 if weight.format == "int8" else torch.uint8])
    n, k = weight.shape
    check.strided("x", x, [None, k], check.HALVES, weight.data)
    check.tensor("weight.scale", weight.scale, [n], [torch.float32], x)
    m = x.shape[0]
    machine = machine_for(x)
    config = config or configure("linear_byte", machine, m=m, n=n)
    block_k = config.tiles["BLOCK_K"]
    ahead = steps_ahead(weight.data, block_k, k)

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_byte_kernel,
            grid,
            x,
            weight.data,
            weight.scale,
            *outputs,
            m,
            n,
            k,
            x.stride(0),
            m * n,
            config=config,
            FORMAT=weight.format,
            WIDEN=machine.widening,
            EVEN_K=k % block_k == 0,
            AHEAD=ahead,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    steps, shortest = -(-k // block_k), max(1, 512 // block_k)
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=steps, shortest=shortest, splits=splits, start=start)


def linear_byte_reference(x: Tensor, weight: ByteWeight) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.dequantized().t()
