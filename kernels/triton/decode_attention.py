"""How does one new token of each sequence attend to its paged context as fast as memory can be read?

A program serves the query heads that share a KV head, so K and V are read once for all of them: multi-head, grouped
and multi-query attention differ only in how many rows of its matrix product are filled (at least 16, what a tensor
core takes). The context is split until every multiprocessor has work; where the parts are few, the program that ends
last combines them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check, split
from membound.kernels.triton.attend import attend, load_rows, normalized, nothing_seen, sink_seen, store_rows
from membound.kernels.triton.kv_blocks import BITS, KvBlocks
from membound.kernels.triton.last import MOST_RESULTS, counters_of, ends_last
from membound.kernels.triton.launch import Config, configure, launch, machine_for, splits_for
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.scores import check_scores, shares

# Rows of parts that one program combines in less time than a launch takes: a quarter of a megabyte from the cache.
MOST_ROWS_HERE = 512


@triton.jit(do_not_specialize=["window", "table_stride"])
def decode_attention_kernel(q, out, partial, log_sum, done, k, v, scales, table, context_len, sinks, scale,
                            softcap, window, table_stride, k_stride, v_stride,
                            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                            BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, WIDEN: tl.constexpr,
                            SHORTEST: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_HALF: tl.constexpr,
                            BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (sequence, KV head and BLOCK_R of its query heads, split).

    A context in parts goes to `partial` and `log_sum`, from where it is combined here if there is `done`, which counts.
    """
    follow(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROW_BLOCKS: tl.constexpr = (GROUP + BLOCK_R - 1) // BLOCK_R
    kv_head = tl.program_id(1) // ROW_BLOCKS
    member = (tl.program_id(1) % ROW_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = member < GROUP
    context = tl.load(context_len + sequence)
    first = split.begin_of(context, 1, window)
    begin, end = split.part_of(first, context, tl.program_id(2), tl.num_programs(2), SHORTEST)
    # Of a context without tokens the first part says so.
    if (log_sum is not None) & (begin >= end) & ((done is None) | (tl.program_id(2) > 0)):
        return
    head = kv_head * GROUP + member
    at = (sequence * HEADS + head) * (2 * HALF)
    q_low, q_high = load_rows(q, at, rows, HALF, BLOCK_HALF)
    STORED: tl.constexpr = HALF if FORMAT == "int4" else 2 * HALF
    if FORMAT == "fp8":
        scale *= tl.load(scales + kv_head)
    state = nothing_seen(BLOCK_R, BLOCK_HALF)
    if sinks is not None:
        state = sink_seen(sinks, head, rows & (tl.program_id(2) == 0), BLOCK_R, BLOCK_HALF)
    state = attend(state, q_low, q_high, scale, softcap, rows, rows, rows, begin, end,
                   table + sequence * table_stride, k + kv_head * STORED, v + kv_head * STORED,
                   scales + kv_head * BLOCK_SIZE, k_stride, v_stride,
                   "end", FORMAT, HALF, BLOCK_HALF, BLOCK_T, KV_HEADS, BLOCK_SIZE, WIDEN)  # fmt: skip
    low, high, sums = normalized(state)
    if FORMAT == "fp8":
        v_scale = tl.load(scales + KV_HEADS + kv_head)
        low *= v_scale
        high *= v_scale
    if log_sum is None:
        store_rows(out, at, low, high, rows, HALF, BLOCK_HALF)
    else:
        row = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + sequence) * HEADS + head
        tl.store(log_sum + row, sums, mask=rows)
        store_rows(partial, row * (2 * HALF), low, high, rows, HALF, BLOCK_HALF)
        if done is not None:
            parts = split.parts_of(first, context, tl.num_programs(2), SHORTEST)
            counter = done + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            if ends_last(counter, parts):
                low, high = combined_rows(partial, log_sum, sequence * HEADS + head, tl.num_programs(0) * HEADS, rows,
                                          parts, HALF, BLOCK_R, BLOCK_HALF)  # fmt: skip
                store_rows(out, at, low, high, rows, HALF, BLOCK_HALF)
                tl.store(counter, 0)


@triton.jit
def combined_rows(partial, log_sum, row, stride, rows, parts, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
                  BLOCK_HALF: tl.constexpr):  # fmt: skip
    """Both halves [BLOCK_R, BLOCK_HALF] of some rows of a context in so many `parts`, each `stride` rows on."""
    d = tl.arange(0, BLOCK_HALF)[None, :]
    inside = rows[:, None] & (d < HALF)
    at = row[:, None] * (2 * HALF) + d
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    low = tl.zeros([BLOCK_R, BLOCK_HALF], tl.float32)
    high = tl.zeros([BLOCK_R, BLOCK_HALF], tl.float32)
    for _ in tl.range(0, parts, loop_unroll_factor=2):
        sums = tl.load(log_sum + row, mask=rows, other=float("-inf"), cache_modifier=".cg")
        part_low = tl.load(partial + at, mask=inside, other=0.0, cache_modifier=".cg")
        part_high = tl.load(partial + at + HALF, mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, sums)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight, decay = tl.exp2(sums - safe), tl.exp2(peak - safe)
        low = low * decay[:, None] + part_low * weight[:, None]
        high = high * decay[:, None] + part_high * weight[:, None]
        total = total * decay + weight
        peak = new_peak
        log_sum += stride
        partial += stride * (2 * HALF)
    sums = tl.where(total == 0.0, 1.0, total)[:, None]
    return low / sums, high / sums


def programs_at_once(tile_bytes: int) -> int:
    """On a multiprocessor, so that tens of kilobytes are under way; `tile_bytes` are of K and V of BLOCK_T tokens.

    What each has in shared memory and registers (`membound kernels resources`) lets as many run at once on sm90.
    """
    return 2 if tile_bytes >= 2**15 else 3 if tile_bytes >= 2**14 else 4


def decode_attention(
    q: Tensor,
    kv: KvBlocks,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Attention of q [sequences, heads, head_dim], the last token of each sequence, over `kv`: the shape of q.

    Sequence i has `context_len[i]` tokens (int32), the query's own included; with 0 its result is 0. Its token t is in
    block `block_table[i, t // block_size]` (int32). With `window` it sees only its last `window` tokens.
    With `softcap` scores become softcap * tanh(score / softcap); `sinks` [heads] (fp32) are logits of no token.
    """
    check.tensor("q", q, [None, None, None], check.HALVES)
    sequences, heads, head_dim = q.shape
    kv.check(head_dim, q)
    check.require(heads % kv.kv_heads == 0, "q", f"{heads} heads are not a multiple of {kv.kv_heads} KV heads")
    check.strided("block_table", block_table, [sequences, None], [torch.int32], q)
    check.tensor("context_len", context_len, [sequences], [torch.int32], q)
    check_scores(softcap, sinks, q)
    check.require(window is None or window > 0, "window", f"is {window}, should be a positive number of tokens")
    machine = machine_for(q)
    group = heads // kv.kv_heads
    bits = BITS[kv.format]
    config = config or configure("decode_attention", machine, head_dim=head_dim, group=group, kv_bits=bits)
    rows = config.tiles["BLOCK_R"]
    programs = sequences * kv.kv_heads * -(-group // rows)
    longest = min(block_table.shape[1] * kv.block_size, window or split.NO_WINDOW)
    shortest = 4 * config.tiles["BLOCK_T"]
    waves = programs_at_once(config.tiles["BLOCK_T"] * 2 * head_dim * bits // 8)
    splits = splits or splits_for(programs, longest, shortest, machine, waves, split.MOST_PARTS)
    out = torch.empty_like(q)
    partial, log_sum = (None, None) if splits == 1 else split.partials(splits, out)
    here = splits > 1 and splits * min(group, rows) <= MOST_ROWS_HERE and programs <= MOST_RESULTS
    launch(
        decode_attention_kernel,
        (sequences, programs // max(sequences, 1), splits),
        q,
        out,
        partial,
        log_sum,
        counters_of(q) if here else None,
        *kv.pointers,
        block_table,
        context_len,
        sinks,
        scale,
        softcap,
        window or split.NO_WINDOW,
        block_table.stride(0),
        *kv.strides,
        config=config,
        HEADS=heads,
        **kv.constants(machine),
        SHORTEST=shortest,
    )
    if log_sum is not None and partial is not None and not here:
        split.combine(partial, log_sum, out, context_len, window=window or split.NO_WINDOW, shortest=shortest)
    return out


def decode_attention_reference(
    q: Tensor,
    kv: KvBlocks,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same, sequence by sequence in fp32."""
    k_blocks, v_blocks = kv.dequantized()
    out = torch.zeros(q.shape, device=q.device)
    group = q.shape[1] // kv.kv_heads
    for i, context in enumerate(context_len.tolist()):
        used = block_table[i, : -(-context // kv.block_size)].long()
        begin = max(context - (window or context), 0)
        k, v = (blocks[used].flatten(0, 1)[begin:context] for blocks in (k_blocks, v_blocks))
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # [context, heads, D]
        scores = torch.einsum("hd,thd->ht", q[i].float(), k) * scale
        out[i] = torch.einsum("ht,thd->hd", shares(scores, softcap, sinks), v)
    return out


def decode_attention_bytes(q: Tensor, kv: KvBlocks, context: Sequence[int], window: int | None = None) -> int:
    """Bytes that must move: q and the result once, K and V (with their scales) of the visible tokens once."""
    visible = sum(min(tokens, window or tokens) for tokens in context)
    return 2 * q.nbytes + kv.token_bytes() * visible
