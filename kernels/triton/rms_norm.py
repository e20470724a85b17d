"""How does a norm cost no more than one pass over its rows, the residual's sum and the quantization included?"""

from __future__ import annotations

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.activation import ActivationFormat, QuantizedRows
from membound.kernels.triton.lang import quantize_rows
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.overlap import follow

WIDEST = 32768  # a row is held in one program's registers


@triton.jit(do_not_specialize=["tokens"])
def rms_norm_kernel(x, residual, weight, out, scale, tokens, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                    FORMAT: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Each program normalizes BLOCK_R rows."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < tokens) & (column[None, :] < WIDTH)
    at = row[:, None] * WIDTH + column[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(residual.dtype.element_ty)
        tl.store(residual + at, stored, mask=inside)
        value = stored.to(tl.float32)  # the norm is of what the next layer will find
    inverse = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    value = value * inverse[:, None] * gain[None, :]
    if FORMAT == "":
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    else:
        quantized, size = quantize_rows(value, FORMAT)
        tl.store(out + at, quantized, mask=inside)
        tl.store(scale + row, size, mask=row < tokens)


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, quantize: None = None
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, quantize: ActivationFormat
) -> QuantizedRows: ...


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    quantize: ActivationFormat | None = None,
) -> Tensor | QuantizedRows:
    """x / rms(x) * weight over the last dimension of x [tokens, width], in x's dtype or quantized row by row.

    With `residual` [tokens, width], x is first added into it, in place, and the norm is of the sum.
    """
    check.strided("x", x, [None, None], check.HALVES)
    tokens, width = x.shape
    check.require(width <= WIDEST, "x", f"rows of {width} are wider than {WIDEST}")
    check.tensor("weight", weight, [width], [torch.float32, *check.HALVES], x)
    if residual is not None:
        check.tensor("residual", residual, [tokens, width], check.HALVES, x)
    block = triton.next_power_of_2(width)
    config = configure("rms_norm", machine_for(x), width=width)
    result = (
        QuantizedRows.empty(quantize, tokens, width, x.device)
        if quantize
        else torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    )
    data, scale = (result.data, result.scale) if isinstance(result, QuantizedRows) else (result, None)
    launch(
        rms_norm_kernel,
        (triton.cdiv(tokens, config.tiles["BLOCK_R"]),),
        x,
        residual,
        weight,
        data,
        scale,
        tokens,
        x.stride(0),
        eps,
        config=config,
        WIDTH=width,
        BLOCK=block,
        FORMAT=quantize or "",
    )
    return result


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The same in fp32; `residual` is left as it is."""
    value = x.float() if residual is None else (x.float() + residual.float()).to(residual.dtype).float()
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()


def rms_norm_bytes(x: Tensor, *, residual: bool, quantized: bool) -> int:
    """Bytes that must move: x in and the result out, the residual in and out, a scale a row if quantized."""
    out = x.numel() + 4 * x.shape[0] if quantized else x.nbytes
    return x.nbytes * (3 if residual else 1) + out
