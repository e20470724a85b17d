"""How do a program's query rows attend to a range of one sequence's paged tokens? The loop of all attention kernels.

Every head is two halves, elements [0, D/2) and [D/2, D): so a byte of two int4 numbers feeds both without a shuffle.
Quantized K and V are never widened to real numbers: a token's scale multiplies its score, or its probability, once,
instead of each of its elements; int4's minimum adds (sum of q) * minimum to the score and (sum of p * minimum) to the
result. Online softmax after Milakov and Gimelshein, 2018; in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from membound.kernels.triton.lang import LOG2E, dot, half_of, softmax_step
from membound.kernels.triton.widen import codes_of, fp8_to, int8_to


@triton.jit
def load_tile(base, block, offset, valid, block_stride, dtype: tl.constexpr, FORMAT: tl.constexpr,
              HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, KV_HEADS: tl.constexpr,
              WIDEN: tl.constexpr):  # fmt: skip
    """Both halves of the tokens' vectors [T, BLOCK_HALF] in `dtype`, not scaled; `base` is the head's in block 0."""
    STORED: tl.constexpr = HALF if FORMAT == "int4" else 2 * HALF
    d = tl.arange(0, BLOCK_HALF)
    at = base + block[:, None] * block_stride + offset[:, None] * (KV_HEADS * STORED) + d[None, :]
    inside = valid[:, None]
    if HALF != BLOCK_HALF:
        inside = inside & (d[None, :] < HALF)
    first = tl.load(at, mask=inside, other=0)
    if FORMAT == "int4":
        low, high = codes_of(first, 0, 0xF, dtype, 0.0, WIDEN), codes_of(first, 4, 0xF, dtype, 0.0, WIDEN)
    else:
        second = tl.load(at + HALF, mask=inside, other=0)
        if FORMAT == "int8":
            low, high = int8_to(first, dtype, WIDEN), int8_to(second, dtype, WIDEN)
        elif FORMAT == "fp8":
            low, high = fp8_to(first, dtype, WIDEN), fp8_to(second, dtype, WIDEN)
        else:
            low, high = first.to(dtype), second.to(dtype)
    return low, high


@triton.jit
def attend(state, q_low, q_high, scale, softcap, first, last, oldest, begin, end, table, k, v, scales, k_stride,
           v_stride, MASK: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
           BLOCK_T: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           WIDEN: tl.constexpr):  # fmt: skip
    """Adds the tokens begin to end of a sequence to `state` = (maximum, sum, low half, high half of the result).

    `k`, `v` and int8's and int4's `scales` point at the head's first element in block 0.
    `first` and `last` say per row which tokens it sees. MASK "end": all before `end`. "range": positions `first` to
    `last`. "tree": all before position `first`, and behind it those whose bit is set in `last` (int64); "seen": of the
    former those from `oldest` on. "full": all, and end - begin is a multiple of BLOCK_T. `softcap` may be None.
    """
    peak, total, low, high = state
    factor = scale * LOG2E
    if FORMAT == "fp8":  # fp16 holds all of its numbers, and half as many instructions widen it
        q_low, q_high = q_low.to(tl.float32).to(tl.float16), q_high.to(tl.float32).to(tl.float16)
    if FORMAT == "int4":
        q_sum = tl.sum(q_low.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        valid = t < end
        block = tl.load(table + t // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        offset = t % BLOCK_SIZE
        if (FORMAT == "int8") or (FORMAT == "int4"):
            word = tl.load(scales + block * (KV_HEADS * BLOCK_SIZE) + offset, mask=valid, other=0)
        k_low, k_high = load_tile(
            k, block, offset, valid, k_stride, q_low.dtype, FORMAT, HALF, BLOCK_HALF, KV_HEADS, WIDEN)  # fmt: skip
        scores = dot(q_low, tl.trans(k_low), tl.zeros([q_low.shape[0], BLOCK_T], tl.float32))
        scores = dot(q_high, tl.trans(k_high), scores)
        if (FORMAT == "int8") or (FORMAT == "int4"):
            scores = scores * half_of(word, 0, tl.float16)[None, :]
        if FORMAT == "int4":
            scores += q_sum[:, None] * half_of(word, 1, tl.float16)[None, :]
        if softcap is None:
            scores *= factor
        else:
            scores = capped(scores * scale, softcap) * LOG2E
        if MASK == "end":
            scores = tl.where(valid[None, :], scores, float("-inf"))
        if MASK == "range":
            seen = (t[None, :] >= first[:, None]) & (t[None, :] <= last[:, None]) & valid[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        if (MASK == "tree") or (MASK == "seen"):
            behind = t[None, :] - first[:, None]
            bit = (last[:, None] >> tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)) & 1
            if MASK == "seen":
                seen = tl.where(behind < 0, t[None, :] >= oldest[:, None], bit == 1) & valid[None, :]
            else:
                seen = ((behind < 0) | (bit == 1)) & valid[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        p, decay, peak, total = softmax_step(scores, peak, total)
        v_low, v_high = load_tile(
            v, block, offset, valid, v_stride, q_low.dtype, FORMAT, HALF, BLOCK_HALF, KV_HEADS, WIDEN)  # fmt: skip
        low = low * decay[:, None]
        high = high * decay[:, None]
        if FORMAT == "int8":
            p = p * half_of(word, 1, tl.float16)[None, :]
        if FORMAT == "int4":
            shift = tl.sum(p * half_of(word, 3, tl.float16)[None, :], 1)
            low += shift[:, None]
            high += shift[:, None]
            p = p * half_of(word, 2, tl.float16)[None, :]
        weights = p.to(q_low.dtype)
        low = dot(weights, v_low, low)
        high = dot(weights, v_high, high)
    return peak, total, low, high


@triton.jit
def bits_of(mask):
    """How many bits of each int64 are set; a shift that keeps the sign is cut to its own bits."""
    pairs = mask - ((mask >> 1) & 0x5555555555555555)
    nibbles = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    sums = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F0F0F0F0F
    sums += sums >> 8
    sums += sums >> 16
    return ((sums + (sums >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def newest_bits(mask, count):
    """The `count` highest of the bits that are set in each int64: above a place that is found by halving."""
    one = tl.full([1], 1, tl.int64)
    beyond = bits_of(mask) - count  # so many are below the place
    place = (mask & 0).to(tl.int64)
    for i in tl.static_range(6):
        below = bits_of(mask & ((one << (place + ((32 >> i) - 1))) - 1))
        place += tl.where(below < beyond, 32 >> i, 0)
    return mask & -(one << place)


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap)."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))


@triton.jit
def sink_seen(sinks, head, here, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """The state before the first token, where a part of a row's weight goes to its head's sink and so to no token.

    Only of the rows that are `here`: of a split context, one part begins with the sinks.
    """
    peak = tl.load(sinks + head, mask=here, other=float("-inf")) * LOG2E
    zeros = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
    return peak, tl.where(here, 1.0, 0.0), zeros, zeros


@triton.jit
def nothing_seen(ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """The state before the first token."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    zeros = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), zeros, zeros


@triton.jit
def store_rows(out, at, low, high, rows, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Writes both halves [ROWS, BLOCK_HALF] of the rows that exist at element offsets `at` [ROWS]."""
    d = tl.arange(0, BLOCK_HALF)
    where = out + at[:, None] + d[None, :]
    inside = rows[:, None] & (d[None, :] < HALF)
    tl.store(where, low.to(out.dtype.element_ty), mask=inside)
    tl.store(where + HALF, high.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(q, at, rows, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Both halves [ROWS, BLOCK_HALF] of the vectors at element offsets `at` [ROWS]; zero where no row is."""
    d = tl.arange(0, BLOCK_HALF)
    where = q + at[:, None] + d[None, :]
    inside = rows[:, None] & (d[None, :] < HALF)
    return tl.load(where, mask=inside, other=0), tl.load(where + HALF, mask=inside, other=0)


@triton.jit
def normalized(state):
    """The result's halves and log2 of the softmax's sum; a row that saw nothing is 0 with -inf."""
    peak, total, low, high = state
    safe = tl.where(total == 0.0, 1.0, total)
    return low / safe[:, None], high / safe[:, None], peak + tl.log2(safe)
