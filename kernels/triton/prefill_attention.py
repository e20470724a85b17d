"""How do the new tokens of many prompts, or of chunks of them, attend causally to their paged context?

One ragged batch: a tile is some tokens of one sequence with all query heads that share a KV head. Which sequence a tile
belongs to is found on the GPU, so the host waits for no lengths. Tiles far behind the diagonal need no mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.attend import attend, load_rows, normalized, nothing_seen, sink_seen, store_rows
from membound.kernels.triton.kv_blocks import BITS, KvBlocks
from membound.kernels.triton.lang import segment_of
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.scores import check_scores, shares
from membound.kernels.triton.split import NO_WINDOW


@triton.jit(do_not_specialize=["window", "sequences", "table_stride"])
def prefill_attention_kernel(q, out, k, v, scales, table, query_start, context_len, sinks,
                             scale, softcap, window, sequences, table_stride, k_stride, v_stride,
                             HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                             BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, WIDEN: tl.constexpr,
                             BLOCK_HALF: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
                             BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (tile, KV head and some of its query heads); the last tiles, which see most, start first."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    MEMBERS: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    BLOCK_Q: tl.constexpr = BLOCK_M // MEMBERS
    MEMBER_BLOCKS: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = segment_of(tile, query_start, sequences, BLOCK_Q, PADDED)
    begin = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - begin
    context = tl.load(context_len + sequence)
    first = (tile - begin // BLOCK_Q - sequence) * BLOCK_Q
    if first >= queries:
        return
    kv_head = tl.program_id(1) // MEMBER_BLOCKS
    row = tl.arange(0, BLOCK_M)
    query = first + row // MEMBERS
    member = (tl.program_id(1) % MEMBER_BLOCKS) * MEMBERS + row % MEMBERS
    rows = (row < BLOCK_Q * MEMBERS) & (query < queries) & (member < GROUP)
    at = ((begin + query).to(tl.int64) * HEADS + kv_head * GROUP + member) * (2 * HALF)
    q_low, q_high = load_rows(q, at, rows, HALF, BLOCK_HALF)
    position = context - queries + query
    end = context - queries + tl.minimum(first + BLOCK_Q, queries)
    seen_by_all = context - queries + first + 1
    start = seen_by_all * 0
    if WINDOW:
        start = tl.maximum(seen_by_all - window, 0)
    STORED: tl.constexpr = HALF if FORMAT == "int4" else 2 * HALF
    if FORMAT == "fp8":
        scale *= tl.load(scales + kv_head)
    table += sequence.to(tl.int64) * table_stride
    k += kv_head * STORED
    v += kv_head * STORED
    if FORMAT != "fp8":
        scales += kv_head * BLOCK_SIZE
    state = nothing_seen(BLOCK_M, BLOCK_HALF)
    if sinks is not None:
        state = sink_seen(sinks, kv_head * GROUP + member, rows, BLOCK_M, BLOCK_HALF)
    oldest = position - window + 1
    if not WINDOW:
        full = seen_by_all // BLOCK_T * BLOCK_T
        state = attend(state, q_low, q_high, scale, softcap, oldest, position, oldest, start, full, table, k, v, scales,
                       k_stride, v_stride, "full", FORMAT, HALF, BLOCK_HALF,
                       BLOCK_T, KV_HEADS, BLOCK_SIZE, WIDEN)  # fmt: skip
        start = full
    state = attend(state, q_low, q_high, scale, softcap, oldest, position, oldest, start, end, table, k, v, scales,
                   k_stride, v_stride, "range", FORMAT, HALF, BLOCK_HALF,
                   BLOCK_T, KV_HEADS, BLOCK_SIZE, WIDEN)  # fmt: skip
    low, high, _ = normalized(state)
    if FORMAT == "fp8":
        v_scale = tl.load(scales + KV_HEADS + kv_head)
        low *= v_scale
        high *= v_scale
    store_rows(out, at, low, high, rows, HALF, BLOCK_HALF)


def prefill_attention(
    q: Tensor,
    kv: KvBlocks,
    block_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Causal attention of q [tokens, heads, head_dim] over `kv`: the shape of q.

    Sequence i brings tokens `query_start[i] : query_start[i + 1]` (int32), the last of its `context_len[i]` (int32);
    its token t is in block `block_table[i, t // block_size]` (int32). With `window` a token sees itself and the
    window - 1 before it. `softcap` and `sinks` are those of `decode_attention`.
    """
    check.tensor("q", q, [None, None, None], check.HALVES)
    tokens, heads, head_dim = q.shape
    kv.check(head_dim, q)
    check.require(heads % kv.kv_heads == 0, "q", f"{heads} heads are not a multiple of {kv.kv_heads} KV heads")
    check.tensor("context_len", context_len, [None], [torch.int32], q)
    sequences = context_len.shape[0]
    check.tensor("query_start", query_start, [sequences + 1], [torch.int32], q)
    check.strided("block_table", block_table, [sequences, None], [torch.int32], q)
    check_scores(softcap, sinks, q)
    check.require(window is None or window > 0, "window", f"is {window}, should be a positive number of tokens")
    machine = machine_for(q)
    config = config or configure("prefill_attention", machine, head_dim=head_dim, kv_bits=BITS[kv.format])
    group = heads // kv.kv_heads
    members = min(group, config.tiles["BLOCK_M"])
    tiles = tokens // (config.tiles["BLOCK_M"] // members) + sequences
    out = torch.empty_like(q)
    launch(
        prefill_attention_kernel,
        (tiles if tokens else 0, kv.kv_heads * -(-group // members)),
        q,
        out,
        *kv.pointers,
        block_table,
        query_start,
        context_len,
        sinks,
        scale,
        softcap,
        window or NO_WINDOW,
        sequences,
        block_table.stride(0),
        *kv.strides,
        config=config,
        HEADS=heads,
        **kv.constants(machine),
        WINDOW=window is not None,
        PADDED=triton.next_power_of_2(sequences),
    )
    return out


def prefill_attention_reference(
    q: Tensor,
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
        position = torch.arange(context - (new.stop - new.start), context, device=q.device)[:, None]
        token = torch.arange(context, device=q.device)
        seen = (token <= position) & (token > position - (window or context))
        scores = torch.einsum("qhd,thd->hqt", q[new].float(), k) * scale
        weights = shares(scores, softcap, sinks, seen)
        out[new] = torch.einsum("hqt,thd->qhd", weights, v)
    return out


def prefill_attention_bytes(q: Tensor, kv: KvBlocks, context: Sequence[int]) -> int:
    """Bytes that must move: q and the result once, K and V of every sequence once however many tokens it brings."""
    return 2 * q.nbytes + kv.token_bytes() * sum(context)


def prefill_attention_flops(q: Tensor, new: Sequence[int], context: Sequence[int]) -> int:
    """Two products of head_dim for each head, new token and token that it sees; a multiply-add is two."""
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for n, c in zip(new, context, strict=True))
    return 4 * q.shape[1] * q.shape[2] * pairs
