"""In which order do files keep the rows of a projection, and in which do we?

Ours are for a rotation of pairs (i, i + head_dim / 2), of which the first `rotated / 2` turn. An order lists for each
of our rows the row of the file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.roofline.models import GroupedQueryAttention
from membound.roofline.models.recurrent import GatedDeltaNet
from membound.runtime.arithmetic import Pairs


def head_order(head_dim: int, rotated: int, pairs: Pairs) -> Tensor:
    """The order within a head whose first `rotated` elements turn, in `pairs` of halves of them or of neighbours."""
    turned, still = torch.arange(rotated), torch.arange(rotated, head_dim)
    first, second = (turned[0::2], turned[1::2]) if pairs == "neighbours" else turned.chunk(2)
    half = len(still) // 2
    return torch.cat([first, still[:half], second, still[half:]])


def heads_order(heads: int, head_dim: int, order: Tensor) -> Tensor:
    """The order of `heads` heads that each end as `order` says, and begin as they are: [heads * head_dim]."""
    kept = torch.arange(head_dim - len(order))
    return (torch.arange(heads)[:, None] * head_dim + torch.cat([kept, order])).flatten()


def by_head_qkv_order(a: GroupedQueryAttention, order: Tensor) -> Tensor:
    """q, k, v of a projection in which each head has its q, its k and its v (GPT-NeoX)."""
    rows = torch.arange(3 * a.heads * a.head_dim).unflatten(0, (a.heads, 3, a.head_dim))
    return torch.cat([rows[:, 0][:, order].flatten(), rows[:, 1][:, order].flatten(), rows[:, 2].flatten()])


def gated_qkv_order(a: GroupedQueryAttention, order: Tensor) -> Tensor:
    """q, gate, k, v of a projection in which each head has its q and then its gate (Qwen3-Next)."""
    queries = torch.arange(2 * a.heads * a.head_dim).unflatten(0, (a.heads, 2, a.head_dim))
    q, gate = queries[:, 0][:, order].flatten(), queries[:, 1].flatten()
    k = queries.numel() + heads_order(a.kv_heads, a.head_dim, order)
    v = queries.numel() + len(k) + torch.arange(a.kv_heads * a.value_dim)
    return torch.cat([q, gate, k, v])


def delta_net_order(mixer: GatedDeltaNet) -> tuple[Tensor, Tensor]:
    """q, k, v, z and b, a of projections in which each key head has its own of them (Qwen3-Next)."""
    each = mixer.value_heads // mixer.key_heads
    widths = [mixer.key_head_dim, mixer.key_head_dim, each * mixer.value_head_dim, each * mixer.value_head_dim]
    rows = torch.arange(mixer.key_heads * sum(widths)).unflatten(0, (mixer.key_heads, -1))
    pairs = torch.arange(2 * mixer.value_heads).unflatten(0, (mixer.key_heads, 2, each))
    qkvz = torch.cat([part.flatten() for part in rows.split(widths, dim=1)])
    return qkvz, torch.cat([pairs[:, 0].flatten(), pairs[:, 1].flatten()])
