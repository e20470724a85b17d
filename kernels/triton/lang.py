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
def softmax_step(scores, peak, total):
    """Weights of more scores [rows, T] in an online softmax in powers of two, how much what was summed before them
    decays, and the peak and the total [rows] from then on."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has peak -inf, and -inf - -inf is NaN.
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - safe)
    p = tl.exp2(scores - safe[:, None])
    return p, decay, new_peak, total * decay + tl.sum(p, 1)


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
def small_to(value, dtype: tl.constexpr, minus):
    """A uint8 or int16 below 128, less `minus` (fp32, of whole numbers up to 127), as `dtype`.

    No slow conversion from an integer: the bits of 128 + value, less 128 + minus. In bf16 the mantissa's 7 bits below
    128.0 count ones, in fp16 the 10 bits below 1024.0 do.
    """
    ONE_MORE: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    shifted = (value.to(tl.int16) | BITS).to(dtype, bitcast=True)
    offset = minus + ONE_MORE
    # The interpreter computes with the bits of bf16, so there the subtraction is in fp32.
    return (shifted.to(tl.float32) - offset).to(dtype) if INTERPRETED else shifted - offset.to(dtype)


@triton.jit
def half_of(word, index: tl.constexpr, dtype: tl.constexpr):
    """The bf16 or fp16 (`dtype`) in bits 16 * index and up of an integer, as fp32."""
    bits = (word >> (16 * index)) & 0xFFFF
    if dtype == tl.bfloat16:
        number = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def power_of_two(exponent):
    """2**(exponent - 127) in fp32 of an e8m0 exponent, 0 to 254 (int32): a fp32 number's own."""
    return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def bits_as_bf16(bits):
    """The bf16 with these bits (int32); the interpreter, which computes with bf16's bits, gets the same as an fp32."""
    return (bits << 16).to(tl.float32, bitcast=True) if INTERPRETED else bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp8_from(number):
    """fp32 rounded to the nearest e4m3 (ties to even, beyond 448 to 448) in a uint8; the inverse of `widen.fp8_to`.

    Times 2**-120 an e4m3 number has its exponent where fp32 has it, and what is rounded off are the low 20 bits.
    """
    bits = number.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(number), 448.0) * 7.52316384526264e-37
    code = size.to(tl.int32, bitcast=True)
    rounded = (code + 0x7FFFF + ((code >> 20) & 1)) >> 20
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_rows(rows, FORMAT: tl.constexpr):
    """Rows [R, N] in fp32 as int8, or e4m3 in uint8, and the scale [R] of each: its largest size / 127, or / 448."""
    LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
    scale = tl.max(tl.abs(rows), 1) / LARGEST
    return rounded_by(rows, scale, FORMAT), scale


@triton.jit
def rounded_by(rows, scale, FORMAT: tl.constexpr):
    """Rows [R, N] in fp32 over the scale [R] of each, rounded to int8, or to e4m3 in uint8."""
    scaled = rows / tl.where(scale > 0.0, scale, 1.0)[:, None]
    return tl.floor(scaled + 0.5).to(tl.int8) if FORMAT == "int8" else fp8_from(scaled)


@triton.jit
def segment_of(index, starts, segments, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """To which of `segments` the tile `index` belongs, where segment i begins at tile starts[i] // BLOCK + i.

    So each segment has room for all its tiles of BLOCK elements without the host knowing how long it is; a few tiles
    are left over and find nothing behind the segment's end. PADDED is a power of two, not below `segments`.
    """
    i = tl.arange(0, PADDED)
    start = tl.load(starts + i, mask=i < segments, other=0)
    return tl.sum(((start // BLOCK + i <= index) & (i < segments)).to(tl.int32), 0) - 1
