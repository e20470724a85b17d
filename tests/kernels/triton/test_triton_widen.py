"""The instructions that widen codes, two at a time, read by a small interpreter of PTX: each makes the number it means.

Triton's own interpreter knows no PTX, so that without a GPU nothing else would run them.
"""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from membound.kernels.triton import widen  # noqa: E402

HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
BYTES = torch.arange(256, dtype=torch.uint8)


def halves_of(register, dtype):
    """Both numbers of registers [n] (int64): [n, 2]."""
    return torch.stack([register & 0xFFFF, register >> 16], dim=1).to(torch.int16).view(dtype)


def register_of(halves):
    bits = halves.view(torch.int16).long() & 0xFFFF
    return bits[:, 0] | (bits[:, 1] << 16)


def permuted(a, b, selector):
    """PTX ISA, `prmt`: each nibble of the selector names one of the eight bytes of b and a, or with 8 added its sign,
    repeated."""
    of_both = a | (b << 32)

    def byte(nibble):
        chosen = (of_both >> (8 * (nibble & 0x7))) & 0xFF
        return (chosen >> 7) * 0xFF if nibble & 0x8 else chosen

    return sum(byte(selector >> (4 * i)) << (8 * i) for i in range(4))


def lookup(a, b, c, table):
    """PTX ISA, `lop3`: bit 4 a + 2 b + c of the table, for each bit."""
    out = torch.zeros_like(a)
    for i in range(8):
        terms = [x if i >> (2 - j) & 1 else ~x for j, x in enumerate((a, b, c))]
        if table >> i & 1:
            out |= terms[0] & terms[1] & terms[2]
    return out & 0xFFFFFFFF


def arithmetic(dtype, compute):
    return lambda *operands: register_of(compute(*(halves_of(one, dtype) for one in operands)))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
INSTRUCTIONS = {
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": lambda a, b, selector: permuted(a, b, int(selector[0])),
    "lop3.b32": lambda a, b, c, table: lookup(a, b, c, int(table[0])),
    "fma.rn.bf16x2": arithmetic(torch.bfloat16, lambda a, b, c: (a.double() * b.double() + c.double()).bfloat16()),
    "sub.f16x2": arithmetic(torch.float16, lambda a, b: a - b),
    "mul.f16x2": arithmetic(torch.float16, lambda a, b: a * b),
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "cvt.rn.f16x2.e4m3x2": lambda a: register_of(
        torch.stack([a & 0xFF, a >> 8], dim=1).to(torch.uint8).view(torch.float8_e4m3fn).half()
    ),
}


def run(code, *given, outputs):
    """What `outputs` registers hold when a piece of PTX was `given` others, each [n] (int64)."""
    values = {f"${outputs + i}": registers for i, registers in enumerate(given)}
    for line in (part.strip(" {}") for part in code.split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, operands = line.split(maxsplit=1)
        target, *sources = (one.strip() for one in operands.split(","))
        read = [values[one] if re.match(r"[$a-z]", one) else torch.full_like(given[0], int(one, 0)) for one in sources]
        values[target] = INSTRUCTIONS[name](*read)
    return [values[f"${i}"] for i in range(outputs)]


def of_bytes(code, dtype):
    """The numbers that a piece of PTX makes of the bytes 0 to 255, four to a register."""
    packed = (BYTES.view(-1, 4).long() << torch.tensor([0, 8, 16, 24])).sum(1)
    return torch.cat([halves_of(one, dtype) for one in run(code, packed, outputs=2)], dim=1).flatten()


@pytest.mark.parametrize("dtype", HALVES)
def test_every_int8_and_every_finite_e4m3_is_widened_exactly(dtype):
    bf16 = dtype == torch.bfloat16
    assert torch.equal(of_bytes(widen._of_int8(bf16), dtype).float(), BYTES.view(torch.int8).float())
    exact = BYTES.view(torch.float8_e4m3fn).float()
    found, finite = of_bytes(widen._of_fp8(bf16), dtype).float(), exact.isfinite()
    assert torch.equal(found[finite], exact[finite]) and torch.equal(found.signbit(), exact.signbit())
    assert torch.equal(of_bytes(widen.CONVERTED.value, torch.float16).float()[finite], exact[finite])


@pytest.mark.parametrize("dtype", HALVES)
def test_codes_of_four_and_two_bits_lie_over_a_number_that_counts_ones(dtype):
    above, ones = widen._above(HALVES[dtype]), 128 if dtype == torch.bfloat16 else 1024
    for shift, mask in [(0, 0xF), (4, 0xF), (0, 3), (2, 3), (4, 3), (6, 3)]:
        found = of_bytes(widen._of_bytes(shift, mask, above), dtype)
        assert torch.equal(found.float() - ones, ((BYTES >> shift) & mask).float())
    words = torch.arange(2**16).view(-1, 2)
    registers = words[:, 0] | (words[:, 1] << 16)
    for lane in range(4):
        (found,) = run(widen._of_words(lane, above), registers, outputs=1)
        assert torch.equal(halves_of(found, dtype).float() - ones, ((words >> (4 * lane)) & 0xF).float())


@pytest.mark.parametrize("high", [False, True])
def test_every_e2m1_of_a_byte_is_widened_exactly(high):
    code = (BYTES >> (4 * high) & 0xF).long()
    found = of_bytes(widen._of_e2m1(high), torch.bfloat16).float()
    exact = E2M1[code & 7] * (1 - 2 * (code >> 3))
    assert torch.equal(found, exact) and torch.equal(found.signbit(), code >= 8)


@pytest.mark.parametrize("quarter", range(4))
def test_two_kept_values_are_put_back_where_the_bits_say_and_zeros_elsewhere(quarter):
    pairs = [(one, other) for one in range(4) for other in range(one + 1, 4)]
    generator = torch.Generator().manual_seed(quarter)
    kept = torch.tensor(pairs)[torch.randint(6, (4096, 2), generator=generator)]  # [n, 2 halves, 2 kept]
    noise = torch.randint(2**16, (4096, 2), generator=generator) & ~(0xF << 4 * quarter)  # of the other quarters
    words = noise | ((1 << kept).sum(-1) << 4 * quarter)
    values = torch.randint(1, 2**15, (2, 4096, 2), generator=generator)
    registers = [one[:, 0] | (one[:, 1] << 16) for one in (words, *values)]
    for place in range(4):
        (found,) = run(widen._of_two(quarter, place), *registers, outputs=1)
        expected = sum(value * (kept[:, :, i] == place) for i, value in enumerate(values))
        assert torch.equal(torch.stack([found & 0xFFFF, found >> 16], dim=1), expected)
