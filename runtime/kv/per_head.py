"""How do KV heads that hold different tokens attend with kernels that read the same tokens for all heads of a sequence?

Each KV head of a sequence is a sequence of its own with one KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch


def per_head_qkv(qkv: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """qkv [tokens, (heads + 2 * kv_heads) * head_dim] as [tokens * kv_heads, (heads / kv_heads + 2) * head_dim]."""
    width = kv_heads * head_dim
    q, k, v = qkv.split([qkv.shape[1] - 2 * width, width, width], dim=1)
    parts = [part.unflatten(1, (kv_heads, -1)) for part in (q, k, v)]
    return torch.cat(parts, dim=-1).flatten(0, 1)


def head_batch(positions: Tensor, slots: Tensor, context_len: Tensor, block_table: Tensor) -> RaggedBatch:
    """A batch in which every sequence brings one token."""
    count = len(context_len)
    return RaggedBatch(
        positions=positions.contiguous(),
        slots=slots.contiguous(),
        query_start=torch.arange(count + 1, dtype=torch.int32, device=positions.device),
        context_len=context_len.int().contiguous(),
        block_table=block_table.int().contiguous(),
        most_queries=1,
    )
