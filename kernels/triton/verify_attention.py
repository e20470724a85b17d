"""How do the drafted tokens of a tree attend, each to the committed context and to its own ancestors?

A tree of up to 64 tokens: bit j of a token's mask says whether it sees the j-th new token of its sequence. The new
tokens and the heads of a group are the rows of one product, so the long context is read once for all of them, and it is
split among programs as in decode. In a window a token sees itself and the last of its ancestors and of the context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check, split
from membound.kernels.triton.attend import (
    attend,
    bits_of,
    load_rows,
    newest_bits,
    normalized,
    nothing_seen,
    sink_seen,
    store_rows,
)
from membound.kernels.triton.kv_blocks import BITS, KvBlocks
from membound.kernels.triton.launch import Config, configure, launch, machine_for, splits_for
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.scores import check_scores, shares

LARGEST_TREE = 64


@triton.jit(do_not_specialize=["window", "tokens", "table_stride"])
def verify_attention_kernel(q, tree, out, log_sum, k, v, scales, table, query_start, context_len,
                            sinks, scale, softcap, window, tokens, table_stride, k_stride, v_stride,
                            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                            BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, WIDEN: tl.constexpr,
                            BLOCK_HALF: tl.constexpr, ROW_BLOCKS: tl.constexpr, WINDOW: tl.constexpr,
                            NARROW: tl.constexpr, SHORTEST: tl.constexpr, OVERLAP: tl.constexpr,
                            BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (sequence, KV head and BLOCK_R of its rows, split); row = new token * GROUP + query head."""
    follow(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1) // ROW_BLOCKS
    row = (tl.program_id(1) % ROW_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - first
    context = tl.load(context_len + sequence)
    oldest_seen = split.begin_of(context, queries, window)
    begin, end = split.part_of(oldest_seen, context, tl.program_id(2), tl.num_programs(2), SHORTEST)
    rows = row < queries * GROUP
    if ((tl.program_id(1) % ROW_BLOCKS) * BLOCK_R >= queries * GROUP) | ((log_sum is not None) & (begin >= end)):
        return
    token = first.to(tl.int64) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    at = (token * HEADS + head) * (2 * HALF)
    q_low, q_high = load_rows(q, at, rows, HALF, BLOCK_HALF)
    bits = tl.load(tree + token, mask=rows, other=0)
    committed = tl.full([BLOCK_R], 0, tl.int32) + (context - queries)
    oldest = committed
    if WINDOW:
        oldest = committed + bits_of(bits) - window
        if NARROW:  # than the largest tree
            bits = newest_bits(bits, window)
    STORED: tl.constexpr = HALF if FORMAT == "int4" else 2 * HALF
    if FORMAT == "fp8":
        scale *= tl.load(scales + kv_head)
    state = nothing_seen(BLOCK_R, BLOCK_HALF)
    if sinks is not None:
        state = sink_seen(sinks, head, rows & (tl.program_id(2) == 0), BLOCK_R, BLOCK_HALF)
    state = attend(state, q_low, q_high, scale, softcap, committed, bits, oldest, begin, end,
                   table + sequence * table_stride, k + kv_head * STORED, v + kv_head * STORED,
                   scales + kv_head * BLOCK_SIZE, k_stride, v_stride,
                   "seen" if WINDOW else "tree", FORMAT, HALF, BLOCK_HALF, BLOCK_T, KV_HEADS, BLOCK_SIZE,
                   WIDEN)  # fmt: skip
    low, high, sums = normalized(state)
    if FORMAT == "fp8":
        v_scale = tl.load(scales + KV_HEADS + kv_head)
        low *= v_scale
        high *= v_scale
    if log_sum is not None:
        part = (tl.program_id(2).to(tl.int64) * tokens + token) * HEADS + head
        tl.store(log_sum + part, sums, mask=rows)
        at = part * (2 * HALF)
    store_rows(out, at, low, high, rows, HALF, BLOCK_HALF)


def verify_attention(
    q: Tensor,
    tree: Tensor,
    kv: KvBlocks,
    block_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    most_queries: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Attention of q [tokens, heads, head_dim], the drafts of each sequence, over `kv`: the shape of q.

    Sequence i brings tokens `query_start[i] : query_start[i + 1]` (int32), at most `most_queries` of its
    `context_len[i]` (int32), stored as its last. Each sees all tokens before those, and the j-th of them if bit j of
    its `tree` [tokens] (int64) is set; its own bit should be. With `window` it sees, of the tokens before those and of
    its ancestors, itself and the window - 1 nearest. `softcap` and `sinks` are those of `decode_attention`.
    """
    check.tensor("q", q, [None, None, None], check.HALVES)
    tokens, heads, head_dim = q.shape
    kv.check(head_dim, q)
    check.require(heads % kv.kv_heads == 0, "q", f"{heads} heads are not a multiple of {kv.kv_heads} KV heads")
    check.tensor("tree", tree, [tokens], [torch.int64], q)
    check.tensor("context_len", context_len, [None], [torch.int32], q)
    sequences = context_len.shape[0]
    check.tensor("query_start", query_start, [sequences + 1], [torch.int32], q)
    check.strided("block_table", block_table, [sequences, None], [torch.int32], q)
    check_scores(softcap, sinks, q)
    check.require(window is None or window > 0, "window", f"is {window}, should be a positive number of tokens")
    check.require(0 < most_queries <= LARGEST_TREE, "most_queries", f"is {most_queries}, should be 1 to {LARGEST_TREE}")
    machine = machine_for(q)
    rows = heads // kv.kv_heads * most_queries
    config = config or configure("verify_attention", machine, head_dim=head_dim, rows=rows, kv_bits=BITS[kv.format])
    row_blocks = -(-rows // config.tiles["BLOCK_R"])
    shortest = 4 * config.tiles["BLOCK_T"]
    seen = window or split.NO_WINDOW
    longest = min(block_table.shape[1] * kv.block_size, seen + most_queries)
    programs = sequences * kv.kv_heads * row_blocks
    splits = splits or splits_for(programs, longest, shortest, machine, most=split.MOST_PARTS)
    out = torch.empty_like(q)
    partial, log_sum = (out, None) if splits == 1 else split.partials(splits, out)
    launch(
        verify_attention_kernel,
        (sequences, kv.kv_heads * row_blocks, splits),
        q,
        tree,
        partial,
        log_sum,
        *kv.pointers,
        block_table,
        query_start,
        context_len,
        sinks,
        scale,
        softcap,
        seen,
        tokens,
        block_table.stride(0),
        *kv.strides,
        config=config,
        HEADS=heads,
        **kv.constants(machine),
        ROW_BLOCKS=row_blocks,
        WINDOW=window is not None,
        NARROW=window is not None and window < most_queries,
        SHORTEST=shortest,
    )
    if splits > 1:
        assert log_sum is not None
        split.combine(partial, log_sum, out, context_len, shortest=shortest, window=seen, query_start=query_start)
    return out


def verify_attention_reference(
    q: Tensor,
    tree: Tensor,
    kv: KvBlocks,
    block_table: Tensor,
    query_start: Tensor,
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
    starts = query_start.tolist()
    for i, context in enumerate(context_len.tolist()):
        new = slice(starts[i], starts[i + 1])
        used = block_table[i, : -(-context // kv.block_size)].long()
        k, v = (blocks[used].flatten(0, 1)[:context] for blocks in (k_blocks, v_blocks))
        k, v = (t.repeat_interleave(q.shape[1] // kv.kv_heads, dim=1) for t in (k, v))  # [context, heads, D]
        behind = torch.arange(context, device=q.device) - (context - (new.stop - new.start))
        seen = (behind < 0) | ((tree[new, None] >> behind.clamp(min=0)) & 1).bool()
        if window is not None:  # of what it sees, the last
            seen &= seen.flip(1).cumsum(1).flip(1) <= window
        scores = torch.einsum("qhd,thd->hqt", q[new].float(), k) * scale
        weights = shares(scores, softcap, sinks, seen)
        out[new] = torch.einsum("hqt,thd->qhd", weights, v)
    return out


def verify_attention_bytes(q: Tensor, kv: KvBlocks, context: Sequence[int], most_seen: int | None = None) -> int:
    """Bytes that must move: q and the result once, the masks, K and V of every sequence once.

    Of those the last `most_seen`, where a window hides the others from all new tokens.
    """
    visible = sum(min(tokens, most_seen or tokens) for tokens in context)
    return 2 * q.nbytes + 8 * q.shape[0] + kv.token_bytes() * visible
