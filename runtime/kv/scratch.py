"""Where do the tokens of a step's sequences lie while a store attends to a copy of them?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.kv.store import PagedKv


class Scratch:
    """K and V of every sequence of a batch in consecutive blocks of its own, and the batch as it is stored there."""

    def __init__(self, batch: RaggedBatch, block_size: int, like: PagedKv, kv_heads: int) -> None:
        """`like` says how they are kept."""
        self.starts, self.ends = spans(batch)
        self.block_size = block_size
        blocks = [-(-end // block_size) for end in self.ends]
        self._first = [sum(blocks[:i]) for i in range(len(blocks))]
        self.kv = like.empty(sum(blocks), block_size, kv_heads)
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        slots = []
        for i, (first, count) in enumerate(zip(self._first, blocks, strict=True)):
            table[i, :count] = torch.arange(first, first + count)
            slots.append(torch.arange(self.starts[i], self.ends[i]) + first * block_size)
        device = self.kv.parts[0].device
        self.batch = replace(batch, block_table=table.to(device), slots=torch.cat(slots).to(device))

    def tokens(self, sequence: int) -> tuple[Tensor, Tensor]:
        """K and V [tokens, kv_heads, head_dim] of a sequence in 16 bits, to be read and written."""
        first, end = self._first[sequence], self.ends[sequence]
        last = first + -(-end // self.block_size)
        k, v = (part[first:last].flatten(0, 1)[:end] for part in self.kv.parts)
        return k, v


def spans(batch: RaggedBatch) -> tuple[list[int], list[int]]:
    """Of each sequence the position of its first new token, and its tokens in all."""
    ends, edges = batch.context_len.tolist(), batch.query_start.tolist()
    return [end - (edges[i + 1] - edges[i]) for i, end in enumerate(ends)], ends


def seats_of(batch: RaggedBatch) -> list[int]:
    """The seat of each sequence; in the order of the batch where nobody gave any."""
    return list(range(batch.num_sequences)) if batch.seats is None else batch.seats.tolist()


def prompt_scratch(new: int, start: int, held: int, block_size: int, like: PagedKv, kv_heads: int) -> Scratch:
    """Room for `held` tokens of one sequence and `new` ones behind them, which stand at `start` in their text."""
    device = like.parts[0].device
    batch = RaggedBatch(
        positions=torch.arange(start, start + new, device=device),
        slots=torch.arange(held, held + new, device=device),
        query_start=torch.tensor([0, new], dtype=torch.int32, device=device),
        context_len=torch.tensor([held + new], dtype=torch.int32, device=device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        most_queries=new,
    )
    return Scratch(batch, block_size, like, kv_heads)
