"""Which tokens of its sequence does each new token see?"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch


def visible_tokens(batch: RaggedBatch, sequence: int, window: int | None = None) -> Tensor:
    """[new tokens, context] bool: which tokens of its sequence each new token sees."""
    first, last = batch.query_start[sequence : sequence + 2].tolist()
    context = int(batch.context_len[sequence])
    device, committed = batch.positions.device, context - (last - first)
    place = torch.arange(context, device=device)
    position = place[committed:, None]  # of the new tokens
    seen = place <= position
    distance = position - place
    if batch.tree is not None:
        bits = batch.tree[first:last, None] >> torch.arange(last - first, device=device) & 1  # [new, new]
        depth = bits.sum(dim=1)  # ancestors and itself
        seen[:, committed:] = bits.bool()
        distance[:, :committed] = committed + depth[:, None] - 1 - place[:committed]
        distance[:, committed:] = depth[:, None] - bits.cumsum(dim=1)  # of the ancestors that it sees
    return seen if window is None else seen & (distance < window)
