"""How does a gated feed-forward layer's activation cost one pass, the quantization for the next linear included?"""

from __future__ import annotations

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from membound.kernels.triton import check
from membound.kernels.triton.activation import ActivationFormat, QuantizedRows
from membound.kernels.triton.lang import quantize_rows
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.overlap import follow

WIDEST_QUANTIZED = 32768  # a row is held in one program's registers, since its scale depends on all of it


@triton.jit
def silu_mul_kernel(gate_up, out, scale, stride, WIDTH: tl.constexpr, FORMAT: tl.constexpr, OVERLAP: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Program (token, block of columns)."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    gate = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if FORMAT == "":
        tl.store(out + token * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)
    else:
        quantized, size = quantize_rows(value, FORMAT)
        tl.store(out + token * WIDTH + column, quantized, mask=inside)
        tl.store(scale + token + tl.arange(0, 1), size)


@overload
def silu_mul(gate_up: Tensor, *, quantize: None = None) -> Tensor: ...


@overload
def silu_mul(gate_up: Tensor, *, quantize: ActivationFormat) -> QuantizedRows: ...


def silu_mul(gate_up: Tensor, *, quantize: ActivationFormat | None = None) -> Tensor | QuantizedRows:
    """silu(gate) * up for gate_up [tokens, 2 * width]: [tokens, width] in its dtype, or quantized row by row."""
    check.strided("gate_up", gate_up, [None, None], check.HALVES)
    tokens, double = gate_up.shape
    check.require(double % 2 == 0, "gate_up", f"has {double} columns, should have as many of gate as of up")
    width = double // 2
    config = configure("silu_mul_quantize" if quantize else "silu_mul", machine_for(gate_up), width=width)
    if quantize:
        check.require(width <= WIDEST_QUANTIZED, "gate_up", f"rows of {width} are wider than {WIDEST_QUANTIZED}")
        result: Tensor | QuantizedRows = QuantizedRows.empty(quantize, tokens, width, gate_up.device)
    else:
        result = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    data, scale = (result.data, result.scale) if isinstance(result, QuantizedRows) else (result, None)
    block = triton.next_power_of_2(width) if quantize else config.tiles["BLOCK"]
    launch(
        silu_mul_kernel,
        (tokens, triton.cdiv(width, block)),
        gate_up,
        data,
        scale,
        gate_up.stride(0),
        config=config.with_tiles(BLOCK=block),
        WIDTH=width,
        FORMAT=quantize or "",
    )
    return result


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The same in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul_bytes(gate_up: Tensor, *, quantized: bool) -> int:
    """Bytes that must move: gate and up in, the result out, a scale a row if quantized."""
    elements = gate_up.numel() // 2
    return gate_up.nbytes + (elements + 4 * gate_up.shape[0] if quantized else gate_up.nbytes // 2)
