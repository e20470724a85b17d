"""How does attention with learned sinks weigh, when part of each head's weight goes to no token?

gpt-oss: each head has a learned logit that joins the softmax and whose value is zero. Xiao et al. 2023, arXiv
2309.17453, section 3.3, call it a sink token. Computed in plain PyTorch, because fused kernels keep no sum of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.reference import visible_tokens
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.blocks.attention import NewStore
from membound.runtime.kv_store import KvStore, PlainKv
from membound.runtime.rope import RopeTables


class SinkKv(PlainKv):
    """K and V as the kernels keep them, attended to beside the logits `sinks` [heads]."""

    sinks: Tensor

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        q = self.kernels.rope_and_store(qkv, rope.cos, rope.sin, batch, self.k_blocks, self.v_blocks)
        _, block_size, kv_heads, _ = self.k_blocks.shape
        starts, sinks = batch.query_start.tolist(), self.sinks.unflatten(0, (kv_heads, -1))[..., None, None]
        out = torch.empty_like(q)
        for i, context in enumerate(batch.context_len.tolist()):
            new = slice(starts[i], starts[i + 1])
            seen = visible_tokens(batch, i, self.window)  # [queries, context]
            table = batch.block_table[i, : -(-context // block_size)].long()
            k, v = (blocks[table].flatten(0, 1)[:context].float() for blocks in (self.k_blocks, self.v_blocks))
            grouped = q[new].float().unflatten(1, (kv_heads, -1))  # [queries, kv_heads, group, head_dim]
            scores = torch.einsum("qhgd,thd->hgqt", grouped, k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            with_sink = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
            shares = with_sink.softmax(-1)[..., :-1]  # [kv_heads, group, queries, context]
            out[new] = torch.einsum("hgqt,thd->qhgd", shares, v).flatten(1, 2).to(out.dtype)
        return out.flatten(1)


def sink_store(kernels: Kernels, sinks: Tensor) -> NewStore:
    """Makes the KV stores of one layer with these sinks."""

    def new_store(attention: GroupedQueryAttention, num_blocks: int, block_size: int, seats: int) -> KvStore:
        store = SinkKv.zeroed(kernels, attention, num_blocks, block_size, sinks.device)
        assert isinstance(store, SinkKv), "zeroed makes what it is called on"
        store.sinks = sinks
        return store

    return new_store
