"""How does one new token of each sequence attend to its paged context as fast as memory can be read?

A program serves the query heads that share a KV head, so K and V are read once for all of them: multi-head, grouped
and multi-query attention differ only in how many rows of its matrix product are filled (at least 16, what a tensor
core takes). The context is split until every multiprocessor has work.
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
from membound.kernels.triton.launch import Config, configure, launch, machine_for, splits_for
from membound.kernels.triton.scores import check_scores, shares


@triton.jit(do_not_specialize=["window", "table_stride"])
def decode_attention_kernel(q, out, log_sum, k, v, scales, table, context_len, sinks, scale, softcap, window,
                            table_stride, k_stride, v_stride,
                            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                            BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, WIDEN: tl.constexpr,
                            SHORTEST: tl.constexpr, BLOCK_HALF: tl.constexpr,
                            BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (sequence, KV head and BLOCK_R of its query heads, split); of a context in one part, no `log_sum`."""
    sequence = tl.program_id(0).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROW_BLOCKS: tl.constexpr = (GROUP + BLOCK_R - 1) // BLOCK_R
    kv_head = tl.program_id(1) // ROW_BLOCKS
    member = (tl.program_id(1) % ROW_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = member < GROUP
    context = tl.load(context_len + sequence)
    first = split.begin_of(context, 1, window)
    begin, end = split.part_of(first, context, tl.program_id(2), tl.num_programs(2), SHORTEST)
    if (log_sum is not None) & (begin >= end):
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
    if log_sum is not None:
        row = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + sequence) * HEADS + head
        tl.store(log_sum + row, sums, mask=rows)
        at = row * (2 * HALF)
    store_rows(out, at, low, high, rows, HALF, BLOCK_HALF)


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
    partial, log_sum = (out, None) if splits == 1 else split.partials(splits, out)
    launch(
        decode_attention_kernel,
        (sequences, programs // max(sequences, 1), splits),
        q,
        partial,
        log_sum,
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
    if splits > 1:
        assert log_sum is not None
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
