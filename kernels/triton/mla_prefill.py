"""How do prompts attend when multi-head latent attention has unpacked its latents into keys and values of every head?

With many new tokens the products with all heads' keys cost less than those with the latents. A key is a head's own part
and a rotated one that all heads share, so it is never put together in memory. Source: DeepSeek-V2, 2024, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.lang import LOG2E, dot, segment_of, softmax_step
from membound.kernels.triton.launch import Config, configure, launch, machine_for


@triton.jit
def attend_unpacked(state, q_own, q_shared, factor, position, begin, end, kv, keys, key_stride,
                    MASKED: tl.constexpr, STRIDE: tl.constexpr, OWN: tl.constexpr, SHARED: tl.constexpr,
                    VALUE: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_SHARED: tl.constexpr,
                    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Adds the tokens begin to end to `state` = (maximum, sum, result); where `MASKED` a row sees up to `position`.

    Otherwise all, and end - begin is a multiple of BLOCK_T. `kv` and `keys` point at the sequence's first token.
    """
    peak, total, acc = state
    o, s, d = tl.arange(0, BLOCK_OWN), tl.arange(0, BLOCK_SHARED), tl.arange(0, BLOCK_V)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        there = t[:, None] < end
        token = kv + t[:, None].to(tl.int64) * STRIDE
        own = tl.load(token + o[None, :], mask=there & (o[None, :] < OWN), other=0.0)
        shared_at = keys + t[:, None].to(tl.int64) * key_stride + s[None, :]
        shared = tl.load(shared_at, mask=there & (s[None, :] < SHARED), other=0.0)
        scores = dot(q_shared, tl.trans(shared), tl.zeros([q_own.shape[0], BLOCK_T], tl.float32))
        scores = dot(q_own, tl.trans(own), scores) * factor
        if MASKED:
            scores = tl.where((t[None, :] <= position[:, None]) & (t[None, :] < end), scores, float("-inf"))
        p, decay, peak, total = softmax_step(scores, peak, total)
        value = tl.load(token + OWN + d[None, :], mask=there & (d[None, :] < VALUE), other=0.0)
        acc = dot(p.to(q_own.dtype), value, acc * decay[:, None])
    return peak, total, acc


@triton.jit(do_not_specialize=["sequences"])
def mla_prefill_kernel(q, kv, keys, out, query_start, kept_start, scale, sequences, key_stride,
                       HEADS: tl.constexpr, OWN: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr,
                       BLOCK_OWN: tl.constexpr, BLOCK_SHARED: tl.constexpr, BLOCK_V: tl.constexpr,
                       PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (tile of one sequence's new tokens, head); the last tiles, which see most, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = segment_of(tile, query_start, sequences, BLOCK_M, PADDED)
    begin = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - begin
    first = (tile - begin // BLOCK_M - sequence) * BLOCK_M
    if first >= queries:
        return
    kept = tl.load(kept_start + sequence)
    context = tl.load(kept_start + sequence + 1) - kept
    head = tl.program_id(1)
    query = first + tl.arange(0, BLOCK_M)
    rows = query[:, None] < queries
    o, s, d = tl.arange(0, BLOCK_OWN), tl.arange(0, BLOCK_SHARED), tl.arange(0, BLOCK_V)
    row = ((begin + query).to(tl.int64) * HEADS + head)[:, None]
    q_own = tl.load(q + row * (OWN + SHARED) + o[None, :], mask=rows & (o[None, :] < OWN), other=0.0)
    q_shared = tl.load(q + row * (OWN + SHARED) + OWN + s[None, :], mask=rows & (s[None, :] < SHARED), other=0.0)
    STRIDE: tl.constexpr = HEADS * (OWN + VALUE)
    kv += kept.to(tl.int64) * STRIDE + head * (OWN + VALUE)
    keys += kept.to(tl.int64) * key_stride
    position = context - queries + query
    full = (context - queries + first + 1) // BLOCK_T * BLOCK_T
    end = context - queries + tl.minimum(first + BLOCK_M, queries)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    factor = scale * LOG2E
    state = attend_unpacked(state, q_own, q_shared, factor, position, 0, full, kv, keys, key_stride, False, STRIDE,
                            OWN, SHARED, VALUE, BLOCK_OWN, BLOCK_SHARED, BLOCK_V, BLOCK_T)  # fmt: skip
    state = attend_unpacked(state, q_own, q_shared, factor, position, full, end, kv, keys, key_stride, True, STRIDE,
                            OWN, SHARED, VALUE, BLOCK_OWN, BLOCK_SHARED, BLOCK_V, BLOCK_T)  # fmt: skip
    _, total, acc = state
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row * VALUE + d[None, :], acc.to(out.dtype.element_ty), mask=rows & (d[None, :] < VALUE))


def mla_prefill(
    q: Tensor,
    unpacked: Tensor,
    keys: Tensor,
    query_start: Tensor,
    kept_start: Tensor,
    scale: float,
    *,
    config: Config | None = None,
) -> Tensor:
    """Causal attention of q [tokens, heads, own + shared]: [tokens, heads, value].

    `unpacked` [kept, heads, own + value] has each head's part of a token's key and its value, `keys` [kept, shared],
    whose first dimension may have gaps, what all heads share. Sequence i brings tokens `query_start[i] :
    query_start[i + 1]` (int32), the last of those that it keeps, `kept_start[i] : kept_start[i + 1]` (int32).
    """
    check.tensor("q", q, [None, None, None], check.HALVES)
    tokens, heads, width = q.shape
    check.strided("keys", keys, [None, None], [q.dtype], q)
    kept, shared = keys.shape
    own = width - shared
    check.require(own > 0, "keys", f"have {shared} elements, q's heads {width}")
    check.tensor("unpacked", unpacked, [kept, heads, None], [q.dtype], q)
    value = unpacked.shape[2] - own
    check.require(value > 0, "unpacked", f"has {unpacked.shape[2]} elements a head, of which {own} are keys")
    check.tensor("query_start", query_start, [None], [torch.int32], q)
    check.tensor("kept_start", kept_start, query_start.shape, [torch.int32], q)
    sequences = query_start.shape[0] - 1
    check.require(sequences >= 0, "query_start", "is empty, should begin with 0")
    config = config or configure("mla_prefill", machine_for(q))
    out = torch.empty(tokens, heads, value, dtype=q.dtype, device=q.device)
    launch(
        mla_prefill_kernel,
        (tokens // config.tiles["BLOCK_M"] + sequences if tokens else 0, heads),
        q,
        unpacked,
        keys,
        out,
        query_start,
        kept_start,
        scale,
        sequences,
        keys.stride(0),
        config=config,
        HEADS=heads,
        OWN=own,
        SHARED=shared,
        VALUE=value,
        BLOCK_OWN=max(16, triton.next_power_of_2(own)),
        BLOCK_SHARED=max(16, triton.next_power_of_2(shared)),
        BLOCK_V=max(16, triton.next_power_of_2(value)),
        PADDED=triton.next_power_of_2(sequences),
    )
    return out


def mla_prefill_reference(
    q: Tensor, unpacked: Tensor, keys: Tensor, query_start: Tensor, kept_start: Tensor, scale: float
) -> Tensor:
    """The same, sequence by sequence in fp32."""
    own = q.shape[2] - keys.shape[1]
    out = torch.zeros(*q.shape[:2], unpacked.shape[2] - own, device=q.device)
    starts, edges = query_start.tolist(), kept_start.tolist()
    for i in range(len(starts) - 1):
        new, seen = slice(starts[i], starts[i + 1]), slice(edges[i], edges[i + 1])
        context, queries = seen.stop - seen.start, new.stop - new.start
        scores = torch.einsum("qhd,thd->hqt", q[new, :, :own].float(), unpacked[seen, :, :own].float())
        scores += torch.einsum("qhd,td->hqt", q[new, :, own:].float(), keys[seen].float())
        place = torch.arange(context, device=q.device)
        visible = place <= place[context - queries :, None]
        shares = (scores * scale).masked_fill(~visible, -torch.inf).softmax(-1)
        out[new] = torch.einsum("hqt,thd->qhd", shares, unpacked[seen, :, own:].float())
    return out


def mla_prefill_bytes(q: Tensor, unpacked: Tensor, keys: Tensor) -> int:
    """Bytes that must move: q, what was unpacked and the shared keys in, the result out."""
    tokens, heads, width = q.shape
    value = unpacked.shape[2] - (width - keys.shape[1])
    return q.nbytes + unpacked.nbytes + keys.numel() * keys.itemsize + tokens * heads * value * q.itemsize


def mla_prefill_flops(q: Tensor, value: int, new: Sequence[int], context: Sequence[int]) -> int:
    """Two products for each head, new token and token that it sees; a multiply-add is two."""
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for n, c in zip(new, context, strict=True))
    return 2 * q.shape[1] * (q.shape[2] + value) * pairs
