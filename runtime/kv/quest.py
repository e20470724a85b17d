"""How does a step of decode read only the pages of its cache that matter to its query?

Source: Tang et al., Quest, ICML 2024, section 3: the least and the largest of each channel's keys bound what any token
of a page can score, so pages are ranked without reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.techniques import KvBudget
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.kv.per_head import per_head_qkv
from membound.runtime.kv.scratch import spans
from membound.runtime.kv_store import move_slots
from membound.runtime.rope import RopeTables

MOST_SELECTING = 33  # new tokens of a sequence that decodes or verifies drafts; a prompt reads all of its pages


class QuestKv:
    """All K and V in blocks, which are the pages, with the bounds of each page's keys; each KV head chooses its own.

    A head of a block is a block of its own for the kernels, so that heads may read different ones. Bounds of a page
    that is written again, after rejected drafts, may be wider than need be and never narrower.
    """

    emulated = False
    on_host = True

    def __init__(
        self,
        kernels: Kernels,
        attention: GroupedQueryAttention,
        budget: KvBudget,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        heads, width = attention.kv_heads, attention.head_dim
        self.kernels, self.heads, self.width, self.block_size = kernels, heads, width, block_size
        self.pages = max(2, budget.tokens // block_size)
        shape = (num_blocks * heads, block_size, 1, width)
        self.k_blocks, self.v_blocks = (torch.zeros(shape, dtype=kernels.kv_dtype, device=device) for _ in range(2))
        bounds = (num_blocks * heads, width)
        self.least, self.largest = (torch.zeros(bounds, dtype=kernels.kv_dtype, device=device) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.k_blocks, self.v_blocks, self.least, self.largest))

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        heads = self.heads
        order, edges = _by_sequence_and_head(batch, heads)
        head = torch.arange(heads, device=qkv.device)
        tables = batch.block_table.long()[:, None] * heads + head[:, None]  # [sequences, heads, blocks]
        by_head = RaggedBatch(
            positions=batch.positions.repeat_interleave(heads)[order],
            slots=self._slots(batch.slots).flatten()[order],
            query_start=edges,
            context_len=batch.context_len.repeat_interleave(heads),
            block_table=tables.flatten(0, 1).int(),
            most_queries=batch.most_queries,
            tree=None if batch.tree is None else batch.tree.repeat_interleave(heads)[order],
        )
        blocks = self.k_blocks, self.v_blocks
        flat = per_head_qkv(qkv, heads, self.width)[order]
        q = self.kernels.rope_and_store(flat, rope.cos, rope.sin, by_head, *blocks)  # [tokens * heads, group, D]
        self._widen_bounds(by_head.slots)
        chosen = self._chosen(q, by_head)
        attended = self.kernels.attention(q, *blocks, chosen, scale, softcap=softcap)
        out = torch.empty_like(attended)
        out[order] = attended
        return out.view(qkv.shape[0], -1)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self._parts(), blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self._parts(), blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        by_token = [part.view(-1, self.heads, self.block_size, self.width).transpose(1, 2) for part in self._blocks()]
        move_slots(by_token, sources, targets)
        self._widen_bounds(self._slots(targets).flatten())

    def _slots(self, slots: Tensor) -> Tensor:
        """Where each head of the tokens in the scheduler's `slots` [tokens] lies: [tokens, heads]."""
        head, size = torch.arange(self.heads, device=slots.device), self.block_size
        return ((slots // size)[:, None] * self.heads + head) * size + (slots % size)[:, None]

    def _blocks(self) -> tuple[Tensor, Tensor]:
        return self.k_blocks, self.v_blocks

    def _parts(self) -> list[Tensor]:
        """All that is kept, by the numbers of the scheduler's blocks."""
        return [part.view(-1, self.heads, *part.shape[1:]) for part in (*self._blocks(), self.least, self.largest)]

    def _widen_bounds(self, slots: Tensor) -> None:
        """The keys in `slots` count for the bounds of their pages; a page's first token begins them anew."""
        rows, offset = slots // self.block_size, slots % self.block_size
        begun = rows[offset == 0]
        self.least[begun], self.largest[begun] = torch.inf, -torch.inf
        keys = self.k_blocks.view(-1, self.width)[slots]
        index = rows[:, None].expand_as(keys)
        self.least.scatter_reduce_(0, index, keys, "amin")
        self.largest.scatter_reduce_(0, index, keys, "amax")

    def _chosen(self, q: Tensor, batch: RaggedBatch) -> RaggedBatch:
        """The same batch, of which every sequence that decodes reads its best pages and those of its new tokens."""
        starts, ends = spans(batch)
        size = self.block_size
        table, contexts = batch.block_table.clone(), list(ends)
        width = batch.block_table.shape[1]
        edges = batch.query_start.tolist()
        for new in {end - start for start, end in zip(starts, ends, strict=True)}:
            rows = [
                i
                for i, (start, end) in enumerate(zip(starts, ends, strict=True))
                if end - start == new <= MOST_SELECTING and start and -(-end // size) > self.pages
            ]
            if not rows:
                continue
            at = torch.tensor(rows, device=q.device)
            firsts = torch.tensor([edges[i] for i in rows], device=q.device)
            queries = q[(firsts[:, None] + torch.arange(new, device=q.device)).flatten()]
            queries = queries.view(len(rows), -1, self.width).float()  # [rows, new * group, D]
            pages = table[at].long()
            least, largest = self.least[pages].float(), self.largest[pages].float()  # [rows, blocks, D]
            bound = queries.clamp(min=0) @ largest.transpose(1, 2) + queries.clamp(max=0) @ least.transpose(1, 2)
            best = bound.amax(dim=1)  # [rows, blocks]
            place = torch.arange(width, device=q.device)
            first = torch.tensor([starts[i] // size for i in rows], device=q.device)[:, None]
            last = torch.tensor([(ends[i] - 1) // size for i in rows], device=q.device)[:, None]
            best = best.masked_fill(place > last, -torch.inf).masked_fill((place >= first) & (place <= last), torch.inf)
            kept = min(width, max(self.pages, 1 + max((ends[i] - 1) // size - starts[i] // size for i in rows)))
            found = best.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
            table[at, :kept] = pages.gather(1, found).int()
            for i in rows:
                contexts[i] = ends[i] - (-(-ends[i] // size) - kept) * size
        return RaggedBatch(
            positions=batch.positions,
            slots=batch.slots,
            query_start=batch.query_start,
            context_len=torch.tensor(contexts, dtype=torch.int32, device=q.device),
            block_table=table,
            most_queries=batch.most_queries,
            tree=batch.tree,
        )


def _by_sequence_and_head(batch: RaggedBatch, heads: int) -> tuple[Tensor, Tensor]:
    """Where token and head, as [tokens, heads] flattened, go when each head of a sequence is one; and their edges."""
    edges = batch.query_start.tolist()
    device = batch.positions.device
    parts = [
        torch.arange(first * heads, last * heads, device=device).view(-1, heads).t().flatten()
        for first, last in pairwise(edges)
    ]
    new = batch.query_start[1:] - batch.query_start[:-1]
    starts = torch.cat([new.new_zeros(1), new.repeat_interleave(heads).cumsum(0)])
    return torch.cat(parts), starts.int()
