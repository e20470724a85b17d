"""How does attention with learned sinks weigh, when part of each head's weight goes to no token?

gpt-oss: each head has a learned logit that joins the softmax and whose value is zero. Xiao et al. 2023, arXiv
2309.17453, section 3.3, call it a sink token.
"""

from __future__ import annotations

from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.blocks.attention import NewStore
from membound.runtime.kv.store import KvStore, PlainKv


class SinkKv(PlainKv):
    """K and V as the kernels keep them, attended to beside the logits `sinks` [heads]."""

    sinks: Tensor

    def read(self, q: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None) -> Tensor:
        where = q, self.k_blocks, self.v_blocks, batch, scale, self.sinks
        return self.kernels.attention_with_sinks(*where, window=self.window, softcap=softcap)


def sink_store(kernels: Kernels, sinks: Tensor) -> NewStore:
    """Makes the KV stores of one layer with these sinks."""

    def new_store(attention: GroupedQueryAttention, num_blocks: int, block_size: int, seats: int) -> KvStore:
        store = SinkKv.zeroed(kernels, attention, num_blocks, block_size, sinks.device)
        assert isinstance(store, SinkKv), "zeroed makes what it is called on"
        store.sinks = sinks.float()
        return store

    return new_store
