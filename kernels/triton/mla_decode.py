"""How does decode attend to a cache of latent vectors, read once for the keys and the values of all heads?

DeepSeek's multi-head latent attention with its up-projections absorbed into q and the output: one vector of RANK
latent and ROPE rotated elements a token is the key of every head, and its latent part is the value. Source:
DeepSeek-V2, 2024, sections 2.1.2 and 2.1.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check, split
from membound.kernels.triton.lang import LOG2E, dot
from membound.kernels.triton.launch import Config, configure, launch, machine_for, splits_for


@triton.jit
def mla_decode_kernel(q, out, log_sum, cache, table, context_len, scale, table_stride, cache_stride,
                      HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      SPLITS: tl.constexpr, SHORTEST: tl.constexpr, BLOCK_R: tl.constexpr,
                      BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (sequence, BLOCK_R heads, split)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = head < HEADS
    context = tl.load(context_len + sequence)
    begin, end = split.part_of(0, context, tl.program_id(2), SPLITS, SHORTEST)
    if (SPLITS > 1) & (begin >= end):
        return
    WIDTH: tl.constexpr = RANK + ROPE
    c = tl.arange(0, RANK)
    r = RANK + tl.arange(0, ROPE)
    at = q + (sequence * HEADS + head)[:, None] * WIDTH
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
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        decay = tl.exp2(peak - new_peak)
        p = tl.exp2(scores - new_peak[:, None])
        total = total * decay + tl.sum(p, 1)
        peak = new_peak
        acc = dot(p.to(latent.dtype), latent, acc * decay[:, None])
    safe = tl.where(total == 0.0, 1.0, total)
    acc /= safe[:, None]
    row = sequence * HEADS + head
    if SPLITS > 1:
        row += tl.program_id(2).to(tl.int64) * tl.num_programs(0) * HEADS
        tl.store(log_sum + row, peak + tl.log2(safe), mask=rows)
    tl.store(out + row[:, None] * RANK + c[None, :], acc.to(out.dtype.element_ty), mask=rows[:, None])


def mla_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    rank: int,
    splits: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Attention of q [sequences, heads, rank + rope], the last token of each sequence: [sequences, heads, rank].

    `cache` is [blocks, block_size, rank + rope], dense within a block, in q's dtype; rank and rope are powers of two
    from 16. Sequence i has `context_len[i]` tokens (int32), token t in block `block_table[i, t // block_size]` (int32).
    """
    check.tensor("q", q, [None, None, None], check.HALVES)
    sequences, heads, width = q.shape
    rope = width - rank
    check.require(
        all(size >= 16 and size & (size - 1) == 0 for size in (rank, rope)),
        "rank",
        f"{rank} of {width} elements leave {rope} rotated ones, both should be powers of two from 16",
    )
    check.strided("cache", cache, [None, None, width], [q.dtype], q)
    check.strided("block_table", block_table, [sequences, None], [torch.int32], q)
    check.tensor("context_len", context_len, [sequences], [torch.int32], q)
    machine = machine_for(q)
    config = config or configure("mla_decode", machine, heads=heads)
    row_blocks = -(-heads // config.tiles["BLOCK_R"])
    shortest = 4 * config.tiles["BLOCK_T"]
    longest = block_table.shape[1] * cache.shape[1]
    splits = splits or splits_for(sequences * row_blocks, longest, shortest, machine, waves=1)
    out = torch.empty(sequences, heads, rank, dtype=q.dtype, device=q.device)
    partial, log_sum = (out, None) if splits == 1 else split.partials(splits, out)
    launch(
        mla_decode_kernel,
        (sequences, row_blocks, splits),
        q,
        partial,
        log_sum,
        cache,
        block_table,
        context_len,
        scale,
        block_table.stride(0),
        cache.stride(0),
        config=config,
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_SIZE=cache.shape[1],
        SPLITS=splits,
        SHORTEST=shortest,
    )
    if splits > 1:
        assert log_sum is not None
        split.combine(partial, log_sum, out, context_len, shortest=shortest)
    return out


def mla_decode_reference(
    q: Tensor, cache: Tensor, block_table: Tensor, context_len: Tensor, scale: float, *, rank: int
) -> Tensor:
    """The same, sequence by sequence in fp32."""
    out = torch.zeros(*q.shape[:2], rank, device=q.device)
    for i, context in enumerate(context_len.tolist()):
        used = block_table[i, : -(-context // cache.shape[1])].long()
        tokens = cache[used].flatten(0, 1)[:context].float()
        out[i] = (q[i].float() @ tokens.t() * scale).softmax(-1) @ tokens[:, :rank]
    return out


def mla_decode_bytes(q: Tensor, context: Sequence[int], rank: int) -> int:
    """Bytes that must move: q and the result once, each sequence's latent vectors once for all heads."""
    sequences, heads, width = q.shape
    return q.nbytes + sequences * heads * rank * q.itemsize + sum(context) * width * q.itemsize
