"""How are activations rounded to bytes: with a scale a token, or for each 128 of its numbers, or one for all tokens?

One pass each, but for the last: every program must know the largest number of all before it rounds its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.activation import STORED, ActivationFormat, QuantizedRows
from membound.kernels.triton.lang import quantize_rows, rounded_by
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.linear_w8a8 import BLOCK, Fp8Blocks
from membound.kernels.triton.overlap import follow

WIDEST = 32768  # a row up to it is held in one program's registers
PART = 8192  # of a wider one a program holds so much at a time, and reads it again, from the cache


@dataclass(frozen=True)
class QuantizedSteps:
    """Activations [tokens, width] in int8, with a `scale` [tokens, width / step] (fp32) for each `step` elements."""

    data: Tensor
    scale: Tensor
    step: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        """The rows in fp32."""
        return (self.data.float().unflatten(1, (-1, self.step)) * self.scale[..., None]).flatten(1)


@triton.jit
def round_rows_kernel(x, out, scale, x_stride, width, spans, SPAN: tl.constexpr, FORMAT: tl.constexpr,
                      OVERLAP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Program (token, BLOCK_R of its spans); each span of SPAN columns has a scale of its own."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK)
    column = span[:, None] * SPAN + j[None, :]
    x_at, out_at = x + token * x_stride + column, out + token * width + column
    scale_at = scale + token * spans + span
    if SPAN <= BLOCK:
        inside = (j[None, :] < SPAN) & (column < width)
        quantized, size = quantize_rows(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), FORMAT)
        tl.store(out_at, quantized, mask=inside)
        tl.store(scale_at, size, mask=span < spans)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        peak = tl.zeros([BLOCK_R, BLOCK], tl.float32)
        for start in range(0, SPAN, BLOCK):
            inside = (j[None, :] < SPAN - start) & (column < width - start)
            peak = tl.maximum(peak, tl.abs(tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)))
        size = tl.max(peak, 1) / LARGEST
        tl.store(scale_at, size, mask=span < spans)
        for start in range(0, SPAN, BLOCK):
            inside = (j[None, :] < SPAN - start) & (column < width - start)
            value = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_at + start, rounded_by(value, size, FORMAT), mask=inside)


@triton.jit
def peak_kernel(x, peak, x_stride, width, BLOCK: tl.constexpr):
    """Program (token, BLOCK of its columns): raises `peak` [1] to the largest size among them."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + tl.program_id(0).to(tl.int64) * x_stride + column
    tl.atomic_max(peak, tl.max(tl.abs(tl.load(at, mask=column < width, other=0.0).to(tl.float32)), 0))


@triton.jit
def round_by_peak_kernel(x, peak, out, scale, x_stride, width, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, BLOCK of its columns): rounds them by the scale of `peak`, which the first one keeps."""
    LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(peak) / LARGEST
    tl.store(scale, size, mask=(token == 0) & (tl.program_id(1) == 0))
    value = tl.load(x + token * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    rounded = rounded_by(value[None, :], size + tl.zeros([1], tl.float32), FORMAT)
    tl.store(out + token * width + column[None, :], rounded, mask=column[None, :] < width)


def round_step(x: Tensor, format: ActivationFormat) -> QuantizedRows:
    """x [tokens, width] in bytes, with one scale for all of it."""
    check.require(format in STORED, "format", f"is {format}, should be one of {', '.join(STORED)}")
    check.strided("x", x, [None, None], [*check.HALVES, torch.float32])
    tokens, width = x.shape
    data = torch.empty(tokens, width, dtype=STORED[format], device=x.device)
    scale, peak = (torch.zeros(1, dtype=torch.float32, device=x.device) for _ in range(2))
    config = configure("round_step", machine_for(x))
    grid = tokens, triton.cdiv(width, config.tiles["BLOCK"])
    launch(peak_kernel, grid, x, peak, x.stride(0), width, config=config)
    launch(round_by_peak_kernel, grid, x, peak, data, scale, x.stride(0), width, config=config, FORMAT=format)
    return QuantizedRows(format, data, scale)


def round_rows(x: Tensor, format: ActivationFormat, *, config: Config | None = None) -> QuantizedRows:
    """x [tokens, width] in bytes, with a scale a token."""
    check.strided("x", x, [None, None], [*check.HALVES, torch.float32])
    tokens, width = x.shape
    result = QuantizedRows.empty(format, tokens, width, x.device)
    block = triton.next_power_of_2(max(width, 1)) if width <= WIDEST else PART
    config = config or configure("round_rows", machine_for(x), width=width).with_tiles(BLOCK=block)
    _round(x, result.data, result.scale, 1, max(width, 1), format, config)
    return result


def round_blocks(x: Tensor) -> Fp8Blocks:
    """x [tokens, width] in e4m3, with a scale for each 128 numbers of a token."""
    check.strided("x", x, [None, None], [*check.HALVES, torch.float32])
    tokens, width = x.shape
    spans = -(-width // BLOCK)
    data = torch.empty(tokens, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(tokens, spans, dtype=torch.float32, device=x.device)
    config = configure("round_blocks", machine_for(x)).with_tiles(BLOCK=BLOCK)
    _round(x, data, scale, spans, BLOCK, "fp8", config)
    return Fp8Blocks(data, scale, 1)


def round_steps(x: Tensor, step: int) -> QuantizedSteps:
    """x [tokens, width] in int8, with a scale for each `step` (32, 64 or 128) numbers of a token."""
    check.strided("x", x, [None, None], [*check.HALVES, torch.float32])
    tokens, width = x.shape
    check.require(step in (32, 64, 128) and width % step == 0, "step", f"is {step} for rows of {width}")
    data = torch.empty(tokens, width, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, width // step, dtype=torch.float32, device=x.device)
    config = configure("round_blocks", machine_for(x)).with_tiles(BLOCK=step)
    _round(x, data, scale, width // step, step, "int8", config)
    return QuantizedSteps(data, scale, step)


def _round(
    x: Tensor, data: Tensor, scale: Tensor, spans: int, span: int, format: ActivationFormat, config: Config
) -> None:
    tokens, width = x.shape
    launch(
        round_rows_kernel,
        (tokens, triton.cdiv(spans, config.tiles["BLOCK_R"])),
        x,
        data,
        scale,
        x.stride(0),
        width,
        spans,
        config=config,
        SPAN=span,
        FORMAT=format,
    )


def round_rows_bytes(x: Tensor, rounded: QuantizedRows | QuantizedSteps | Fp8Blocks) -> int:
    """Bytes that must move: x in, the codes and their scales out.

    Of a step with one scale x is read twice, the second time from the cache.
    """
    return x.nbytes + rounded.nbytes
