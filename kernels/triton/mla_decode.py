"""How does decode attend to a cache of latent vectors, read once for the keys and the values of all heads?

DeepSeek's multi-head latent attention with its up-projections absorbed into q and the output: one vector of RANK
latent and ROPE rotated elements a token is the key of every head, and its latent part is the value. Drafts are more
rows of the same products, as in `verify_attention`. Source: DeepSeek-V2, 2024, sections 2.1.2 and 2.1.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check, split
from membound.kernels.triton.lang import LOG2E, dot, softmax_step
from membound.kernels.triton.launch import Config, configure, launch, machine_for, splits_for
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.verify_attention import LARGEST_TREE


@triton.jit(do_not_specialize=["tokens", "table_stride"])
def mla_decode_kernel(q, tree, out, log_sum, cache, table, query_start, context_len, scale, tokens, table_stride,
                      cache_stride,
                      HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      OVERLAP: tl.constexpr,
                      SHORTEST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (sequence, BLOCK_R of its rows, split); row = new token * HEADS + head."""
    follow(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    context = tl.load(context_len + sequence)
    begin, end = split.part_of(0, context, tl.program_id(2), tl.num_programs(2), SHORTEST)
    first = sequence
    queries = 1
    if tree is not None:
        first = tl.load(query_start + sequence).to(tl.int64)
        queries = tl.load(query_start + sequence + 1) - first.to(tl.int32)
    rows = row < queries * HEADS
    if (tl.program_id(1) * BLOCK_R >= queries * HEADS) | ((log_sum is not None) & (begin >= end)):
        return
    if tree is not None:
        bits = tl.load(tree + first + row // HEADS, mask=rows, other=0)
        committed = context - queries
    WIDTH: tl.constexpr = RANK + ROPE
    c = tl.arange(0, RANK)
    r = RANK + tl.arange(0, ROPE)
    at = q + (first * HEADS + row)[:, None] * WIDTH
    q_latent = tl.load(at + c[None, :], mask=rows[:, None], other=0.0)
    q_rope = tl.load(at + r[None, :], mask=rows[:, None], other=0.0)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, RANK], tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        valid = t < end
        block = tl.load(table + sequence * table_stride + t // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        token = cache + (block * cache_stride + (t % BLOCK_SIZE) * WIDTH)[:, None]
        latent = tl.load(token + c[None, :], mask=valid[:, None], other=0.0)
        rope = tl.load(token + r[None, :], mask=valid[:, None], other=0.0)
        scores = dot(q_rope, tl.trans(rope), tl.zeros([BLOCK_R, BLOCK_T], tl.float32))
        scores = dot(q_latent, tl.trans(latent), scores) * (scale * LOG2E)
        seen = valid[None, :]
        if tree is not None:
            behind = t[None, :] - committed
            bit = (bits[:, None] >> tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)) & 1
            seen = seen & ((behind < 0) | (bit == 1))
        scores = tl.where(seen, scores, float("-inf"))
        p, decay, peak, total = softmax_step(scores, peak, total)
        acc = dot(p.to(latent.dtype), latent, acc * decay[:, None])
    safe = tl.where(total == 0.0, 1.0, total)
    acc /= safe[:, None]
    at_row = first * HEADS + row
    if log_sum is not None:
        at_row += tl.program_id(2).to(tl.int64) * tokens * HEADS
        tl.store(log_sum + at_row, peak + tl.log2(safe), mask=rows)
    tl.store(out + at_row[:, None] * RANK + c[None, :], acc.to(out.dtype.element_ty), mask=rows[:, None])


def latents_fit(rank: int, rope: int) -> bool:
    """Whether the kernel takes latents of this size: powers of two from 16, what a tensor core multiplies."""
    return all(size >= 16 and size & (size - 1) == 0 for size in (rank, rope))


def mla_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    rank: int,
    tree: Tensor | None = None,
    query_start: Tensor | None = None,
    most_queries: int = 1,
    splits: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Attention of q [tokens, heads, rank + rope] over latents: [tokens, heads, rank].

    `cache` is [blocks, block_size, rank + rope], dense within a block, in q's dtype; rank and rope are powers of two
    from 16. Sequence i has `context_len[i]` tokens (int32), token t in block `block_table[i, t // block_size]` (int32),
    and the i-th q is its last token. With a `tree` [tokens] (int64) it brings those from `query_start[i]` to
    `query_start[i + 1]` (int32), at most `most_queries`, and each sees what it sees in `verify_attention`.
    """
    check.tensor("q", q, [None, None, None], check.HALVES)
    tokens, heads, width = q.shape
    rope = width - rank
    check.require(
        latents_fit(rank, rope),
        "rank",
        f"{rank} of {width} elements leave {rope} rotated ones, both should be powers of two from 16",
    )
    check.strided("cache", cache, [None, None, width], [q.dtype], q)
    check.tensor("context_len", context_len, [tokens if tree is None else None], [torch.int32], q)
    sequences = context_len.shape[0]
    check.strided("block_table", block_table, [sequences, None], [torch.int32], q)
    if tree is not None:
        check.tensor("tree", tree, [tokens], [torch.int64], q)
        if query_start is None:
            raise ValueError("query_start: is missing, a tree needs it")
        check.tensor("query_start", query_start, [sequences + 1], [torch.int32], q)
        fits = 0 < most_queries <= LARGEST_TREE
        check.require(fits, "most_queries", f"is {most_queries}, should be 1 to {LARGEST_TREE}")
    machine = machine_for(q)
    rows = heads if tree is None else heads * most_queries
    config = config or configure("mla_decode", machine, heads=rows, queries=1 if tree is None else most_queries)
    row_blocks = -(-rows // config.tiles["BLOCK_R"])
    shortest = 4 * config.tiles["BLOCK_T"]
    longest = block_table.shape[1] * cache.shape[1]
    waves = 2 if config.tiles["BLOCK_R"] == 16 else 1  # of more rows, one program takes most of the shared memory
    splits = splits or splits_for(sequences * row_blocks, longest, shortest, machine, waves, split.MOST_PARTS)
    out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    partial, log_sum = (out, None) if splits == 1 else split.partials(splits, out)
    launch(
        mla_decode_kernel,
        (sequences, row_blocks, splits),
        q,
        tree,
        partial,
        log_sum,
        cache,
        block_table,
        query_start,
        context_len,
        scale,
        tokens,
        block_table.stride(0),
        cache.stride(0),
        config=config,
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_SIZE=cache.shape[1],
        SHORTEST=shortest,
    )
    if splits > 1:
        assert log_sum is not None
        starts = query_start if tree is not None else None
        split.combine(partial, log_sum, out, context_len, shortest=shortest, query_start=starts)
    return out


def mla_decode_reference(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    rank: int,
    tree: Tensor | None = None,
    query_start: Tensor | None = None,
) -> Tensor:
    """The same, sequence by sequence in fp32."""
    out = torch.zeros(*q.shape[:2], rank, device=q.device)
    starts = list(range(len(context_len) + 1)) if query_start is None else query_start.tolist()
    for i, context in enumerate(context_len.tolist()):
        new = slice(starts[i], starts[i + 1])
        used = block_table[i, : -(-context // cache.shape[1])].long()
        kept = cache[used].flatten(0, 1)[:context].float()
        scores = torch.einsum("qhw,tw->qht", q[new].float(), kept) * scale
        if tree is not None:
            behind = torch.arange(context, device=q.device) - (context - (new.stop - new.start))
            seen = (behind < 0) | ((tree[new, None] >> behind.clamp(min=0)) & 1).bool()  # [queries, context]
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
        out[new] = scores.softmax(-1) @ kept[:, :rank]
    return out


def mla_decode_bytes(q: Tensor, context: Sequence[int], rank: int) -> int:
    """Bytes that must move: q and the result once, each sequence's latent vectors once for all heads and queries."""
    tokens, heads, width = q.shape
    return q.nbytes + tokens * heads * rank * q.itemsize + sum(context) * width * q.itemsize
