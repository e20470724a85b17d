"""How do codes of 8, 4 and 2 bits become halves as fast as memory brings them?

Triton takes each code apart by itself: three and more instructions of the arithmetic units, which then take longer than
the memory. On NVIDIA's GPUs a register holds two halves, and bytes are moved between registers by one instruction: so
codes are put under an exponent whose mantissa counts ones, and what that adds is subtracted from two at once. After Kim
et al., Who Says Elephants Can't Run, 2022, section 3.2, and Marlin's `dequant.h` in vLLM.

`WIDEN` says by which instructions: "ptx" are those of every GPU of NVIDIA's, "fp8" also converts e4m3, "" are Triton's.
With "pure" all is as with "fp8" but where it happens.

Each reads its input before it writes a result, which may be the same register. What is made of bytes is called impure,
so that it is made where they were read, many at a time, and then goes to where the tensor cores want it. Otherwise
Triton moves the bytes there first, by ones and twos. It must where the products of Blackwell's data-centre GPUs are
pipelined, which takes pure operations only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from membound.kernels.triton.lang import bits_as_bf16, small_to, widen_fp8
from membound.kernels.triton.machine import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.constexpr_function
def _above(dtype: tl.dtype) -> int:
    """The bits of 128 in bf16, of 1024 in fp16: a mantissa that counts ones."""
    return 0x4300 if dtype == tl.bfloat16 else 0x6400


@triton.constexpr_function
def _of_words(lane: int, above: int) -> str:
    """Of both 16-bit words of a register the nibble `lane`, below the bits `above`."""
    both = f"lop3.b32 $0, {'$1' if lane == 0 else 't'}, 0x000F000F, 0x{above:04X}{above:04X}, 0xEA;"
    return both if lane == 0 else f"{{ .reg .b32 t; shr.u32 t, $1, {4 * lane}; {both} }}"


@triton.constexpr_function
def _of_bytes(shift: int, mask: int, above: int) -> str:
    """Of four bytes the bits `mask` from `shift` on, below the bits `above`."""
    high, masks = (f"0x{4 * f'{byte:02X}'}" for byte in (above >> 8, mask))
    spread = f"prmt.b32 $0, t, {high}, 0x4140; prmt.b32 $1, t, {high}, 0x4342;"
    return f"{{ .reg .b32 t; shr.u32 t, $2, {shift}; and.b32 t, t, {masks}; {spread} }}"


@triton.constexpr_function
def _of_int8(bf16: bool) -> str:
    """Four int8 as halves: 128 and the low bits, less 128 or, with the sign, 256; in fp16 1152 and all, less 1152."""
    if not bf16:
        spread = "prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342;"
        less = "mov.b32 c, 0x64806480; sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c;"
        return f"{{ .reg .b32 t, c; xor.b32 t, $2, 0x80808080; {spread} {less} }}"
    each = " ".join(
        f"prmt.b32 p, w, 0, {order}; lop3.b32 a, p, 0x007F007F, 0x43004300, 0xEA; "
        f"lop3.b32 b, p, 0x00800080, 0xC300C300, 0xEA; fma.rn.bf16x2 ${i}, a, one, b;"
        for i, order in enumerate(("0x4140", "0x4342"))
    )
    return f"{{ .reg .b32 w, p, a, b, one; mov.b32 w, $2; mov.b32 one, 0x3F803F80; {each} }}"


@triton.constexpr_function
def _of_fp8(bf16: bool) -> str:
    """Four e4m3 as halves: exponent and mantissa moved to where these have them, and times the other bias, subnormals
    included."""
    shift, bits, bias = (4, "0x07F007F0", "0x7B807B80") if bf16 else (1, "0x3F803F80", "0x5C005C00")
    times = "fma.rn.bf16x2 ${}, t, bias, nothing;" if bf16 else "mul.f16x2 ${}, t, bias;"
    each = " ".join(
        f"prmt.b32 r, w, 0, {order}; shr.u32 t, r, {shift}; and.b32 s, r, 0x80008000; lop3.b32 t, t, {bits}, s, 0xEA; "
        + times.format(i)
        for i, order in enumerate(("0x1404", "0x3424"))
    )
    set_up = f"mov.b32 w, $2; mov.b32 bias, {bias}; mov.b32 nothing, 0x80008000;"
    return f"{{ .reg .b32 w, r, s, t, bias, nothing; {set_up} {each} }}"


@triton.constexpr_function
def _of_e2m1(high: bool) -> str:
    """The low or high nibbles of four bytes as bf16, in the same way; what lies below a nibble the masks take off."""
    each = " ".join(
        f"prmt.b32 r, w, 0, {order}; shr.u32 t, r, 6; and.b32 s, r, 0x80008000; lop3.b32 t, t, 0x01C001C0, s, 0xEA; "
        f"fma.rn.bf16x2 ${i}, t, bias, nothing;"
        for i, order in enumerate(("0x1404", "0x3424"))
    )
    set_up = f"shl.b32 w, $2, {0 if high else 4}; mov.b32 bias, 0x7E807E80;"
    return f"{{ .reg .b32 w, r, s, t, bias, nothing; {set_up} mov.b32 nothing, 0x80008000; {each} }}"


@triton.constexpr_function
def _of_two(quarter: int, place: int) -> str:
    """Of both halves of $2 and $3, the kept values of two groups of four, the one at `place`, or zero; $1 has the bits.

    A mask is the sign of a byte into which its bit was shifted. Between the first place and the last the value is the
    first that is kept, but behind the first place the second, and the second, but before the last place the first.
    """

    def mask(name: str, at: int) -> str:
        bit = 4 * quarter + at
        return f"shl.b32 t, $1, {7 - bit % 8}; prmt.b32 {name}, t, 0, 0x{'AA88' if bit < 8 else 'BB99'};"

    here, begin = mask("here", place), "{ .reg .b32 t, here, edge;"
    if place in (0, 3):
        return f"{begin} {here} and.b32 $0, {'$2' if place == 0 else '$3'}, here; }}"
    edge, one, other = (mask("edge", 0), "$3", "$2") if place == 1 else (mask("edge", 3), "$2", "$3")
    return f"{begin} {here} {edge} lop3.b32 t, edge, {one}, {other}, 0xCA; and.b32 $0, t, here; }}"


CONVERTED = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 t; cvt.u16.u32 low, $2; shr.u32 t, $2, 16; cvt.u16.u32 high, t; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)


@triton.jit
def less(bits, dtype: tl.constexpr, MINUS: tl.constexpr):
    """Bits (int16) that `_above` was put over, as numbers in `dtype` less MINUS."""
    ONES: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    return bits.to(dtype, bitcast=True) - tl.full([1, 1], MINUS + ONES, tl.float32).to(dtype)


@triton.jit
def nibbles(word, LANE: tl.constexpr, dtype: tl.constexpr, MINUS: tl.constexpr, WIDEN: tl.constexpr):
    """Bits 4 LANE to 4 LANE + 3 of an int16, or of a uint8, as the number 0 to 15 in `dtype`, less MINUS."""
    if WIDEN != "" and word.dtype == tl.int16:
        CODE: tl.constexpr = _of_words(LANE, _above(dtype))
        bits = tl.inline_asm_elementwise(CODE, "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2)
        number = less(bits, dtype, MINUS)
    else:
        number = codes_of(word, 4 * LANE, 0xF, dtype, MINUS, WIDEN)
    return number


@triton.jit
def codes_of(byte, SHIFT: tl.constexpr, MASK: tl.constexpr, dtype: tl.constexpr, MINUS: tl.constexpr,
             WIDEN: tl.constexpr):  # fmt: skip
    """The bits MASK (below 128) of uint8 from SHIFT on as numbers in `dtype`, less MINUS."""
    if WIDEN != "" and byte.dtype == tl.uint8:
        CODE: tl.constexpr = _of_bytes(SHIFT, MASK, _above(dtype))
        bits = tl.inline_asm_elementwise(CODE, "=r,=r,r", [byte], dtype=tl.int16, is_pure=WIDEN == "pure", pack=4)
        number = less(bits, dtype, MINUS)
    else:
        number = small_to((byte >> SHIFT) & MASK, dtype, tl.full([1, 1], MINUS, tl.float32))
    return number


@triton.jit
def int8_to(value, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """An int8 as `dtype`; the interpreter would take the integer for the bits of a bf16."""
    if WIDEN != "":
        CODE: tl.constexpr = _of_int8(dtype == tl.bfloat16)
        bits = tl.inline_asm_elementwise(CODE, "=r,=r,r", [value], dtype=tl.int16, is_pure=WIDEN == "pure", pack=4)
        number = bits.to(dtype, bitcast=True)
    elif INTERPRETED:
        number = value.to(tl.float32).to(dtype)
    else:
        number = value.to(dtype)
    return number


@triton.jit
def fp8_to(byte, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """e4m3 in a uint8 as `dtype`; NaN may become 480, nothing that this project stores is NaN."""
    if WIDEN != "":
        FP16: tl.constexpr = dtype == tl.float16
        CODE: tl.constexpr = CONVERTED if WIDEN != "ptx" and FP16 else _of_fp8(not FP16)
        bits = tl.inline_asm_elementwise(CODE, "=r,=r,r", [byte], dtype=tl.int16, is_pure=WIDEN == "pure", pack=4)
        number = bits.to(dtype, bitcast=True)
    else:
        number = widen_fp8(byte, dtype)
    return number


@triton.jit
def e2m1_to_bf16(byte, HIGH: tl.constexpr, WIDEN: tl.constexpr):
    """OCP e2m1 in the low or HIGH nibbles of uint8: 0, 0.5, 1, 1.5, 2, 3, 4, 6, negative with the highest bit."""
    if WIDEN != "":
        CODE: tl.constexpr = _of_e2m1(HIGH)
        bits = tl.inline_asm_elementwise(CODE, "=r,=r,r", [byte], dtype=tl.int16, is_pure=WIDEN == "pure", pack=4)
        number = bits.to(tl.bfloat16, bitcast=True)
    else:
        code = (byte >> (4 * HIGH)).to(tl.int32)
        # Exponent and mantissa move to where bf16 has them, and 2**126 makes up for the other bias.
        moved = bits_as_bf16(((code & 8) << 12) | ((code & 7) << 6))
        number = (moved * 8.507059173023462e37).to(tl.bfloat16)
    return number


@triton.jit
def placed(word, first, second, QUARTER: tl.constexpr, PLACE: tl.constexpr, WIDEN: tl.constexpr):
    """What a group of four has at PLACE: its `first` or `second` kept value (halves), or zero.

    Bits 4 QUARTER and up of `word` (int16) say of each place whether it is kept; two are.
    """
    low, high = first.to(tl.int16, bitcast=True), second.to(tl.int16, bitcast=True)
    if WIDEN != "":
        CODE: tl.constexpr = _of_two(QUARTER, PLACE)
        bits = tl.inline_asm_elementwise(CODE, "=r,r,r,r", [word, low, high], dtype=tl.int16, is_pure=True, pack=2)
    else:
        code = (word >> (4 * QUARTER)) & 0xF
        if PLACE == 0:
            value = low
        elif PLACE == 1:
            value = tl.where((code & 1) != 0, high, low)
        elif PLACE == 2:
            value = tl.where((code & 8) != 0, low, high)
        else:
            value = high
        bits = tl.where((code & (1 << PLACE)) != 0, value, value & 0)
    return bits.to(first.dtype, bitcast=True)
