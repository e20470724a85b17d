"""What do several kernels say to Triton in the same words?"""

from __future__ import annotations

import triton
import triton.language as tl

from membound.kernels.triton.machine import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32. Triton's interpreter multiplies the bits of bf16, so there it is widened first."""
    return acc + tl.dot(a.to(tl.float32), b.to(tl.float32)) if INTERPRETED else tl.dot(a, b, acc)


@triton.jit
def widen_fp8(byte, dtype: tl.constexpr):
    """OCP e4m3 in a uint8 as `dtype`, by integer operations where the hardware has no such conversion.

    Exponent and mantissa move to where fp32 has them, and 2**120 makes up for the other bias, subnormals included.
    NaN becomes 480; nothing that this project stores is NaN.
    """
    bits = byte.to(tl.int32)
    shifted = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def fp8_to(byte, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 in a uint8 as `dtype`, by the hardware if it can (`NATIVE`)."""
    return byte.to(tl.float8e4nv, bitcast=True).to(dtype) if NATIVE else widen_fp8(byte, dtype)


@triton.jit
def low_nibble(byte, dtype: tl.constexpr):
    """Bits 0 to 3 of a uint8 as the number 0 to 15 in `dtype`."""
    return small_to(byte & 0xF, dtype)


@triton.jit
def high_nibble(byte, dtype: tl.constexpr):
    """Bits 4 to 7 of a uint8 as the number 0 to 15 in `dtype`."""
    return small_to(byte >> 4, dtype)


@triton.jit
def small_to(value, dtype: tl.constexpr):
    """A uint8 below 128 as `dtype`, without the slow conversion from an integer: the bits of 128 + v, minus 128.

    In bf16 the mantissa's 7 bits below 128.0 count ones, in fp16 the 10 bits below 1024.0 do.
    """
    if dtype == tl.bfloat16:
        shifted = (value.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        if INTERPRETED:  # computes with the bits of bf16, so there the subtraction is in fp32
            shifted = shifted.to(tl.float32)
        number = shifted - 128.0
    else:
        number = (value.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    return number.to(dtype)


@triton.jit
def int8_to(value, dtype: tl.constexpr):
    """An int8 as `dtype`; the interpreter would take the integer for the bits of a bf16."""
    if INTERPRETED:
        value = value.to(tl.float32)
    return value.to(dtype)
