"""How much attention do the last tokens pay to each token, found without asking a GPU how long the sequences are?

All sequences are padded to the width of the block table and to the most tokens that one brings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch

SCORES_AT_ONCE = 2**26  # of so many at a time the fp32 numbers are held


def attention_received(
    q: Tensor,
    k_blocks: Tensor,
    batch: RaggedBatch,
    scale: float,
    *,
    queries: int,
    most: int,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`Kernels.attention_scores` of a batch without a tree, whose sequences bring at most `most` tokens.

    Beyond a sequence's context it is 0: [sequences, kv_heads, width of the block table in tokens].
    """
    block_size, kv_heads = k_blocks.shape[1:3]
    table, starts, context = batch.block_table, batch.query_start.long(), batch.context_len.long()
    count, width = table.shape[0], table.shape[1] * block_size
    place = torch.arange(width, device=q.device)
    there = place < context[:, None]  # [sequences, width]
    blocks = table.long().where(there[:, ::block_size], 0)  # entries behind the context may be anything
    keys = k_blocks[blocks].flatten(1, 2).float()  # [sequences, width, kv_heads, D]
    keys = keys.masked_fill(~there[:, :, None, None], 0.0).permute(0, 2, 3, 1)  # [sequences, kv_heads, D, width]
    received = torch.zeros(count, kv_heads, width, device=q.device)
    heads, last = q.shape[1], min(queries, most)
    at_once = max(1, SCORES_AT_ONCE // max(count * heads * width, 1))
    for first in range(0, last, at_once):
        behind = torch.arange(last - first, max(last - first - at_once, 0), -1, device=q.device)  # rows to the end
        row = starts[1:, None] - behind  # [sequences, rows]
        own = row >= starts[:-1, None]
        asked = q[row.clamp(min=0)].float().unflatten(2, (kv_heads, -1))  # [sequences, rows, kv_heads, group, D]
        scores = asked.permute(0, 2, 3, 1, 4).flatten(2, 3) @ keys * scale  # [sequences, kv_heads, group * rows, width]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (context[:, None] - behind)[:, :, None] - place  # [sequences, rows, width]
        seen = (distance >= 0) & own[:, :, None]
        if window is not None:
            seen &= distance < window
        scores = scores.unflatten(2, (-1, behind.shape[0])).masked_fill(~seen[:, None, None], -torch.inf)
        received += scores.softmax(-1).masked_fill(~own[:, None, None, :, None], 0.0).sum((2, 3))
    return received
