"""How are the oldest of KIVI's recent tokens rounded to codes, and where do these lie?

Keys by channel, a group of tokens at a time; values by token, a group of channels at a time. Source: Liu et al., KIVI,
ICML 2024, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.kivi import KiviBlocks
from membound.kernels.recurrent import seats_of
from membound.kernels.triton import check
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.overlap import follow


@triton.jit
def key_meta_at(table, begin, channel, kv_head, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Where the scale and the minimum of each channel lie for the group of tokens from `begin` on, in words."""
    SPAN: tl.constexpr = GROUP // BLOCK_SIZE if GROUP > BLOCK_SIZE else 1  # blocks of a group
    PLACES: tl.constexpr = BLOCK_SIZE // GROUP if BLOCK_SIZE > GROUP else 1  # groups of a block
    EACH: tl.constexpr = HEAD_DIM // SPAN
    inside = channel < HEAD_DIM
    block = tl.load(table + begin // BLOCK_SIZE + tl.where(inside, channel // EACH, 0)).to(tl.int64)
    place = begin % BLOCK_SIZE // GROUP
    return ((block * PLACES + place) * KV_HEADS + kv_head) * EACH + channel % EACH


@triton.jit
def rounded_group(x, axis: tl.constexpr, BITS: tl.constexpr):
    """The scale and the minimum, in fp16, of each group of x [tokens, channels] along `axis`."""
    low = tl.min(x, axis).to(tl.float16)
    spread = tl.maximum(tl.max(x, axis) - low.to(tl.float32), 0.0)
    return (spread / ((1 << BITS) - 1)).to(tl.float16), low


@triton.jit
def codes_of(x, scale, low, BITS: tl.constexpr):
    """x in codes of the scale and the minimum beside it, all fp32."""
    steps = (x - low) / tl.where(scale > 0.0, scale, 1.0)
    return tl.minimum(tl.maximum(tl.floor(steps + 0.5), 0.0), 1.0 * ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def kivi_round_kernel(key_codes, key_meta, value_codes, value_meta, recent_keys, recent_values, rounded, seats, table,
                      query_start, context_len, table_stride,
                      KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                      WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, PART: tl.constexpr,
                      OVERLAP: tl.constexpr, BLOCK_PART: tl.constexpr):  # fmt: skip
    """Program (sequence, KV head): rounds the oldest recent tokens, until those of this step fit into the window."""
    follow(OVERLAP)
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(context_len + sequence)
    start = context - (tl.load(query_start + sequence + 1) - tl.load(query_start + sequence))
    if context == 0:
        return
    seat = tl.load(seats + sequence)
    before = tl.where(start == 0, 0, tl.load(rounded + seat * KV_HEADS + kv_head))
    beyond = tl.maximum(before, tl.cdiv(tl.maximum(context - WINDOW, 0), GROUP) * GROUP)
    table += sequence * table_stride
    c = tl.arange(0, BLOCK_PART)
    g = tl.arange(0, GROUP)
    LANES: tl.constexpr = 8 // BITS
    for begin in range(before, beyond, GROUP):
        t = begin + g
        recent = ((seat * WINDOW + t % WINDOW) * KV_HEADS + kv_head) * HEAD_DIM
        block = tl.load(table + t // BLOCK_SIZE).to(tl.int64)
        vector = (block * BLOCK_SIZE + t % BLOCK_SIZE) * KV_HEADS + kv_head
        key_byte = tl.zeros([GROUP, BLOCK_PART], tl.int32)
        value_byte = tl.zeros([GROUP, BLOCK_PART], tl.int32)
        for lane in tl.static_range(LANES):
            channel = lane * PART + c
            here = (c < PART)[None, :]
            at = recent[:, None] + channel[None, :]
            x = tl.load(recent_keys + at, mask=here, other=0.0).to(tl.float32)
            scale, low = rounded_group(x, 0, BITS)
            meta = key_meta + 2 * key_meta_at(table, begin, channel, kv_head, HEAD_DIM, KV_HEADS, BLOCK_SIZE, GROUP)
            tl.store(meta, scale, mask=c < PART)
            tl.store(meta + 1, low, mask=c < PART)
            key_byte |= codes_of(x, scale.to(tl.float32)[None, :], low.to(tl.float32)[None, :], BITS) << (BITS * lane)
            x = tl.load(recent_values + at, mask=here, other=0.0).to(tl.float32)
            scales = tl.zeros([GROUP, BLOCK_PART], tl.float32)
            lows = tl.zeros([GROUP, BLOCK_PART], tl.float32)
            for number in tl.static_range(HEAD_DIM // GROUP):
                whole = tl.load(recent_values + recent[:, None] + (number * GROUP + g)[None, :]).to(tl.float32)
                scale, low = rounded_group(whole, 1, BITS)
                if lane == 0:
                    meta = value_meta + 2 * (vector * (HEAD_DIM // GROUP) + number)
                    tl.store(meta, scale)
                    tl.store(meta + 1, low)
                own = channel[None, :] // GROUP == number
                scales = tl.where(own, scale.to(tl.float32)[:, None], scales)
                lows = tl.where(own, low.to(tl.float32)[:, None], lows)
            value_byte |= codes_of(x, scales, lows, BITS) << (BITS * lane)
        to = vector[:, None] * PART + c[None, :]
        tl.store(key_codes + to, key_byte.to(tl.uint8), mask=(c < PART)[None, :])
        tl.store(value_codes + to, value_byte.to(tl.uint8), mask=(c < PART)[None, :])
    tl.store(rounded + seat * KV_HEADS + kv_head, beyond)


def kivi_round(kv: KiviBlocks, batch: RaggedBatch, config: Config | None = None) -> None:
    """Rounds each sequence's oldest recent tokens, until the new ones of a batch, at most `kv.most_new`, fit."""
    check_kivi(kv, batch, kv.recent_keys)
    machine = machine_for(kv.recent_keys)
    launch(
        kivi_round_kernel,
        (batch.num_sequences, kv.kv_heads),
        *kv.parts,
        kv.recent_keys,
        kv.recent_values,
        kv.rounded,
        seats_of(batch),
        batch.block_table,
        batch.query_start,
        batch.context_len,
        batch.block_table.stride(0),
        config=config or configure("kivi_round", machine),
        **constants_of(kv),
    )


def constants_of(kv: KiviBlocks) -> dict[str, Any]:
    """What is compiled into a kernel that reads or writes these codes."""
    part = kv.key_codes.shape[3]
    return dict(
        KV_HEADS=kv.kv_heads,
        HEAD_DIM=kv.head_dim,
        BITS=kv.bits,
        GROUP=kv.group,
        WINDOW=kv.window,
        BLOCK_SIZE=kv.block_size,
        PART=part,
        BLOCK_PART=max(16, triton.next_power_of_2(part)),
    )


def check_kivi(kv: KiviBlocks, batch: RaggedBatch, like: Tensor) -> None:
    """Raises ValueError, which names the argument, unless the kernels can read and write these safely."""
    check.require(kv.bits in (2, 4), "kv.bits", f"is {kv.bits}, should be 2 or 4")
    power = kv.group >= 16 and kv.group & (kv.group - 1) == 0
    check.require(power, "kv.group", f"is {kv.group}, should be a power of two from 16")
    check.require(batch.tree is None, "batch.tree", "codes are attended to causally, leave it out")
    fitting = max(kv.group, kv.block_size) % min(kv.group, kv.block_size) == 0 == kv.head_dim % kv.group
    check.require(fitting, "kv.group", f"is {kv.group} for blocks of {kv.block_size} and heads of {kv.head_dim}")
    check.tensor("kv.key_codes", kv.key_codes, [None] * 4, [torch.uint8], like)
    blocks, size, heads, stored = kv.key_codes.shape
    check.require(stored * 8 == kv.head_dim * kv.bits, "kv.key_codes", f"has {stored} bytes for {kv.head_dim} channels")
    unit = min(size, kv.group)
    shapes: list[tuple[str, Tensor, Sequence[int | None], torch.dtype]] = [
        ("kv.value_codes", kv.value_codes, kv.key_codes.shape, torch.uint8),
        ("kv.key_meta", kv.key_meta, [blocks, size // unit, heads, kv.head_dim * unit // kv.group, 2], torch.float16),
        ("kv.value_meta", kv.value_meta, [blocks, size, heads, kv.head_dim // kv.group, 2], torch.float16),
        ("kv.recent_keys", kv.recent_keys, [None, None, heads, kv.head_dim], torch.bfloat16),
        ("kv.recent_values", kv.recent_values, kv.recent_keys.shape, torch.bfloat16),
        ("kv.rounded", kv.rounded, [kv.recent_keys.shape[0], heads], torch.int32),
    ]
    for name, value, shape, dtype in shapes:
        check.tensor(name, value, shape, [dtype], like)
    sequences = batch.num_sequences
    check.tensor("batch.query_start", batch.query_start, [sequences + 1], [torch.int32], like)
    check.tensor("batch.context_len", batch.context_len, [sequences], [torch.int32], like)
    check.strided("batch.block_table", batch.block_table, [sequences, None], [torch.int32], like)
    check.tensor("batch.seats", seats_of(batch), [sequences], [torch.int64], like)


def kivi_round_bytes(kv: KiviBlocks, tokens: int) -> int:
    """Bytes that must move to round so many tokens: K and V in bf16 in, their codes with scales out."""
    token = sum(part[0].nbytes for part in kv.parts) // kv.block_size
    return tokens * (token + 2 * kv.kv_heads * kv.head_dim * kv.recent_keys.itemsize)
