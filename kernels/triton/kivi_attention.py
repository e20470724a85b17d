"""How do the newest tokens attend to KIVI's cache, whose codes are read as they are stored?

As in `decode_attention` a program serves the query heads that share a KV head, and the context is split. A group of
keys shares a scale and a minimum a channel, so these are multiplied into q once for all of its tokens: q k is
(q scale) code + q minimum. The codes of one byte belong to channels that lie far apart, so each of a byte's lanes is a
product of its own. What is not rounded yet follows in bf16. Source: Liu et al., KIVI, ICML 2024, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.kivi import KiviBlocks
from membound.kernels.recurrent import seats_of
from membound.kernels.triton import check, split
from membound.kernels.triton.kivi_round import check_kivi, constants_of, key_meta_at
from membound.kernels.triton.lang import LOG2E, dot, half_of, softmax_step
from membound.kernels.triton.launch import Config, configure, launch, machine_for, splits_for
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.widen import codes_of


@triton.jit
def lane_of(byte, LANE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """The codes in bits BITS * LANE and up of each byte, as numbers."""
    return codes_of(byte, BITS * LANE, (1 << BITS) - 1, dtype, 0.0, WIDEN)


@triton.jit
def lane_scores(scores, shift, q, byte, words, table, begin, kv_head, LANE: tl.constexpr, BITS: tl.constexpr,
                PART: tl.constexpr, BLOCK_PART: tl.constexpr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """Adds one lane's channels of q [R, BLOCK_PART] times keys to `scores` [R, GROUP], and their minima to `shift`."""
    c = tl.arange(0, BLOCK_PART)
    at = key_meta_at(table, begin, LANE * PART + c, kv_head, HEAD_DIM, KV_HEADS, BLOCK_SIZE, GROUP)
    word = tl.load(words + at, mask=c < PART, other=0)
    wide = q.to(tl.float32)
    shift += tl.sum(wide * half_of(word, 1, tl.float16)[None, :], 1)
    scaled = (wide * half_of(word, 0, tl.float16)[None, :]).to(q.dtype)
    return dot(scaled, tl.trans(lane_of(byte, LANE, BITS, q.dtype, WIDEN)), scores), shift


@triton.jit
def lane_values(acc, p, byte, words, LANE: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr,
                BLOCK_PART: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """acc + p [R, T] (fp32) times one lane's channels of the values, whose `words` point at each token's scales [T].

    Where these share a scale and a minimum, it is p that they are multiplied with, as in `attend`.
    """
    code = lane_of(byte, LANE, BITS, dtype, WIDEN)
    if GROUP % PART == 0:
        word = tl.load(words + LANE * PART // GROUP)
        acc += tl.sum(p * half_of(word, 1, tl.float16)[None, :], 1)[:, None]
        acc = dot((p * half_of(word, 0, tl.float16)[None, :]).to(dtype), code, acc)
    else:
        if PART % GROUP == 0:  # each word is loaded once
            number = tl.arange(0, BLOCK_PART // GROUP)
            at = words[:, None] + (LANE * PART // GROUP + number)[None, :]
            few = tl.load(at, mask=(number < PART // GROUP)[None, :], other=0)
            shape: tl.constexpr = [code.shape[0], BLOCK_PART // GROUP, GROUP]
            word = tl.reshape(tl.broadcast_to(few[:, :, None], shape), code.shape)
        else:
            c = tl.arange(0, BLOCK_PART)
            at = words[:, None] + (LANE * PART + c)[None, :] // GROUP
            word = tl.load(at, mask=(c < PART)[None, :], other=0)
        value = code.to(tl.float32) * half_of(word, 0, tl.float16) + half_of(word, 1, tl.float16)
        acc = dot(p.to(dtype), value.to(dtype), acc)
    return acc


@triton.jit(do_not_specialize=["window", "tokens", "table_stride"])
def kivi_attention_kernel(q, out, log_sum, key_codes, key_words, value_codes, value_words, recent_keys, recent_values,
                          rounded, seats, table, query_start, context_len, scale, window, tokens, table_stride,
                          HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
                          GROUP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, PART: tl.constexpr,
                          BLOCK_PART: tl.constexpr, ROW_BLOCKS: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
                          OVERLAP: tl.constexpr,
                          SHORTEST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (sequence, KV head and BLOCK_R of its rows, split); row = new token * query heads + query head."""
    follow(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    MEMBERS: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1) // ROW_BLOCKS
    row = (tl.program_id(1) % ROW_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - first
    context = tl.load(context_len + sequence)
    oldest_seen = split.begin_of(context, queries, window)
    begin, end = split.part_of(oldest_seen, context, tl.program_id(2), tl.num_programs(2), SHORTEST)
    rows = row < queries * MEMBERS
    if ((tl.program_id(1) % ROW_BLOCKS) * BLOCK_R >= queries * MEMBERS) | ((log_sum is not None) & (begin >= end)):
        return
    seat = tl.load(seats + sequence)
    codes = tl.load(rounded + seat * KV_HEADS + kv_head)
    token = first.to(tl.int64) + row // MEMBERS
    head = kv_head * MEMBERS + row % MEMBERS
    position = context - queries + row // MEMBERS
    oldest = position - window + 1
    c = tl.arange(0, BLOCK_PART)
    here = (c < PART)[None, :]
    at = q + (token * HEADS + head)[:, None] * HEAD_DIM + c[None, :]
    FOUR: tl.constexpr = BITS == 2
    q0 = tl.load(at, mask=rows[:, None] & here, other=0.0)
    q1 = tl.load(at + PART, mask=rows[:, None] & here, other=0.0)
    if FOUR:
        q2 = tl.load(at + 2 * PART, mask=rows[:, None] & here, other=0.0)
        q3 = tl.load(at + 3 * PART, mask=rows[:, None] & here, other=0.0)
    table += sequence * table_stride
    factor = scale * LOG2E
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc0 = tl.zeros([BLOCK_R, BLOCK_PART], tl.float32)
    acc1 = tl.zeros([BLOCK_R, BLOCK_PART], tl.float32)
    acc2 = tl.zeros([BLOCK_R, BLOCK_PART], tl.float32)
    acc3 = tl.zeros([BLOCK_R, BLOCK_PART], tl.float32)
    # A group's codes are few bytes, so that many groups are under way; of the recent tokens there are few.
    for start in tl.range(begin // GROUP * GROUP, tl.minimum(end, codes), GROUP, num_stages=STAGES):
        t = start + tl.arange(0, GROUP)
        block = tl.load(table + t // BLOCK_SIZE).to(tl.int64)
        vector = (block * BLOCK_SIZE + t % BLOCK_SIZE) * KV_HEADS + kv_head
        byte = tl.load(key_codes + vector[:, None] * PART + c[None, :], mask=here, other=0)
        scores = tl.zeros([BLOCK_R, GROUP], tl.float32)
        shift = tl.zeros([BLOCK_R], tl.float32)
        scores, shift = lane_scores(scores, shift, q0, byte, key_words, table, start, kv_head, 0, BITS, PART,
                                    BLOCK_PART, HEAD_DIM, KV_HEADS, BLOCK_SIZE, GROUP, WIDEN)  # fmt: skip
        scores, shift = lane_scores(scores, shift, q1, byte, key_words, table, start, kv_head, 1, BITS, PART,
                                    BLOCK_PART, HEAD_DIM, KV_HEADS, BLOCK_SIZE, GROUP, WIDEN)  # fmt: skip
        if FOUR:
            scores, shift = lane_scores(scores, shift, q2, byte, key_words, table, start, kv_head, 2, BITS, PART,
                                        BLOCK_PART, HEAD_DIM, KV_HEADS, BLOCK_SIZE, GROUP, WIDEN)  # fmt: skip
            scores, shift = lane_scores(scores, shift, q3, byte, key_words, table, start, kv_head, 3, BITS, PART,
                                        BLOCK_PART, HEAD_DIM, KV_HEADS, BLOCK_SIZE, GROUP, WIDEN)  # fmt: skip
        scores = (scores + shift[:, None]) * factor
        seen = (t[None, :] >= oldest[:, None]) & (t >= begin)[None, :] & (t < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        p, decay, peak, total = softmax_step(scores, peak, total)
        byte = tl.load(value_codes + vector[:, None] * PART + c[None, :], mask=here, other=0)
        words = value_words + vector * (HEAD_DIM // GROUP)
        acc0 = lane_values(acc0 * decay[:, None], p, byte, words, 0, BITS, PART, BLOCK_PART, GROUP, q0.dtype, WIDEN)
        acc1 = lane_values(acc1 * decay[:, None], p, byte, words, 1, BITS, PART, BLOCK_PART, GROUP, q0.dtype, WIDEN)
        if FOUR:
            acc2 = lane_values(acc2 * decay[:, None], p, byte, words, 2, BITS, PART, BLOCK_PART, GROUP, q0.dtype, WIDEN)
            acc3 = lane_values(acc3 * decay[:, None], p, byte, words, 3, BITS, PART, BLOCK_PART, GROUP, q0.dtype, WIDEN)
    for start in tl.range(tl.maximum(begin, codes), end, BLOCK_T, num_stages=min(STAGES, 3)):
        t = start + tl.arange(0, BLOCK_T)
        valid = t < end
        vector = ((seat * WINDOW + t % WINDOW) * KV_HEADS + kv_head) * HEAD_DIM
        inside = valid[:, None] & here
        keys = recent_keys + vector[:, None] + c[None, :]
        scores = dot(q0, tl.trans(tl.load(keys, mask=inside, other=0.0)), tl.zeros([BLOCK_R, BLOCK_T], tl.float32))
        scores = dot(q1, tl.trans(tl.load(keys + PART, mask=inside, other=0.0)), scores)
        if FOUR:
            scores = dot(q2, tl.trans(tl.load(keys + 2 * PART, mask=inside, other=0.0)), scores)
            scores = dot(q3, tl.trans(tl.load(keys + 3 * PART, mask=inside, other=0.0)), scores)
        seen = (t[None, :] >= oldest[:, None]) & (t[None, :] <= position[:, None]) & valid[None, :]
        scores = tl.where(seen, scores * factor, float("-inf"))
        p, decay, peak, total = softmax_step(scores, peak, total)
        weights = p.to(q0.dtype)
        values = recent_values + vector[:, None] + c[None, :]
        acc0 = dot(weights, tl.load(values, mask=inside, other=0.0), acc0 * decay[:, None])
        acc1 = dot(weights, tl.load(values + PART, mask=inside, other=0.0), acc1 * decay[:, None])
        if FOUR:
            acc2 = dot(weights, tl.load(values + 2 * PART, mask=inside, other=0.0), acc2 * decay[:, None])
            acc3 = dot(weights, tl.load(values + 3 * PART, mask=inside, other=0.0), acc3 * decay[:, None])
    sums = tl.where(total == 0.0, 1.0, total)
    place = token * HEADS + head
    if log_sum is not None:
        place += tl.program_id(2).to(tl.int64) * tokens * HEADS
        tl.store(log_sum + place, peak + tl.log2(sums), mask=rows)
    to = out + place[:, None] * HEAD_DIM + c[None, :]
    inside = rows[:, None] & here
    tl.store(to, (acc0 / sums[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(to + PART, (acc1 / sums[:, None]).to(out.dtype.element_ty), mask=inside)
    if FOUR:
        tl.store(to + 2 * PART, (acc2 / sums[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(to + 3 * PART, (acc3 / sums[:, None]).to(out.dtype.element_ty), mask=inside)


def kivi_attention(
    q: Tensor,
    kv: KiviBlocks,
    batch: RaggedBatch,
    scale: float,
    *,
    window: int | None = None,
    splits: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Causal attention of q [tokens, heads, head_dim] over `kv`: the shape of q.

    The new tokens are among the recent already. With `window` a token sees itself and the window - 1 before it; then
    no sequence brings more than one.
    """
    check.tensor("q", q, [batch.num_tokens, None, None], [torch.bfloat16])
    tokens, heads, head_dim = q.shape
    check.require(head_dim == kv.head_dim, "q", f"head_dim is {head_dim}, should be the cache's {kv.head_dim}")
    check.require(heads % kv.kv_heads == 0, "q", f"{heads} heads are not a multiple of {kv.kv_heads} KV heads")
    check_kivi(kv, batch, q)
    most = batch.queries_at_most
    one = window is None or (window > 0 and most == 1)
    check.require(one, "window", f"is {window} for up to {most} tokens of a sequence, should be positive and for one")
    machine = machine_for(q)
    rows = heads // kv.kv_heads * most
    config = config or configure("kivi_attention", machine, rows=rows, head_dim=head_dim)
    row_blocks = -(-rows // config.tiles["BLOCK_R"])
    programs = batch.num_sequences * kv.kv_heads * row_blocks
    longest = min(batch.block_table.shape[1] * kv.block_size, window or split.NO_WINDOW)
    shortest = 4 * kv.group
    # What each has in registers (`membound kernels resources`) lets as many run at once on sm90 at head_dim 128.
    waves = 2 if config.tiles["BLOCK_R"] > 16 else 4 if kv.bits == 2 else 3
    splits = splits or splits_for(programs, longest, shortest, machine, waves, split.MOST_PARTS)
    out = torch.empty_like(q)
    partial, log_sum = (out, None) if splits == 1 else split.partials(splits, out)
    words = (t.flatten(-2).view(torch.int32) for t in (kv.key_meta, kv.value_meta))
    key_words, value_words = words
    launch(
        kivi_attention_kernel,
        (batch.num_sequences, kv.kv_heads * row_blocks, splits),
        q,
        partial,
        log_sum,
        kv.key_codes,
        key_words,
        kv.value_codes,
        value_words,
        kv.recent_keys,
        kv.recent_values,
        kv.rounded,
        seats_of(batch),
        batch.block_table,
        batch.query_start,
        batch.context_len,
        scale,
        window or split.NO_WINDOW,
        tokens,
        batch.block_table.stride(0),
        config=config,
        HEADS=heads,
        **constants_of(kv),
        ROW_BLOCKS=row_blocks,
        WIDEN=machine.widening,
        STAGES=config.num_stages,
        SHORTEST=shortest,
    )
    if splits > 1:
        assert log_sum is not None
        seen = window or split.NO_WINDOW
        starts = batch.query_start
        split.combine(partial, log_sum, out, batch.context_len, shortest=shortest, window=seen, query_start=starts)
    return out


def kivi_attention_reference(
    q: Tensor, kv: KiviBlocks, batch: RaggedBatch, scale: float, *, window: int | None = None
) -> Tensor:
    """The same, sequence by sequence in fp32."""
    out = torch.zeros(q.shape, device=q.device)
    starts, seats = batch.query_start.tolist(), seats_of(batch).tolist()
    for i, context in enumerate(batch.context_len.tolist()):
        new = slice(starts[i], starts[i + 1])
        codes = min(int(kv.rounded[seats[i], 0]), context)
        recent = torch.arange(codes, context, device=q.device) % kv.window
        k, v = (
            torch.cat([old, newest[seats[i], recent].float()])
            for old, newest in zip(
                kv.unpacked(batch.block_table[i], codes), (kv.recent_keys, kv.recent_values), strict=True
            )
        )
        k, v = (t.repeat_interleave(q.shape[1] // kv.kv_heads, dim=1) for t in (k, v))  # [context, heads, D]
        position = torch.arange(context - (new.stop - new.start), context, device=q.device)[:, None]
        token = torch.arange(context, device=q.device)
        seen = (token <= position) & (token > position - (window or context))
        scores = torch.einsum("qhd,thd->hqt", q[new].float(), k) * scale
        out[new] = torch.einsum("hqt,thd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return out


def kivi_attention_bytes(q: Tensor, kv: KiviBlocks, context: Sequence[int]) -> int:
    """Bytes that must move: q and the result once, the codes with their scales, and the recent tokens in bf16."""
    token = sum(part[0].nbytes for part in kv.parts) // kv.block_size
    recent = 2 * kv.kv_heads * kv.head_dim * kv.recent_keys.itemsize
    codes = [kv.groups_before(tokens) for tokens in context]
    return 2 * q.nbytes + sum(c * token + (t - c) * recent for c, t in zip(codes, context, strict=True))
