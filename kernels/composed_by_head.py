"""How does a device without kernels of its own for them serve KV heads that hold or read different tokens?

Each KV head of a sequence is a sequence of its own with one KV head, for the kernels that there are.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import RaggedBatch
from membound.kernels.by_head import HeadBlocks, HeldTokens, PageBounds
from membound.kernels.paged import PagedKernels


@dataclass(frozen=True)
class HeadBatch:
    """A batch in which each head of a sequence is a sequence, and where each token's heads, in their order, went."""

    batch: RaggedBatch
    order: Tensor  # [tokens * kv_heads]


@dataclass(frozen=True)
class Selection:
    """Sequences that bring equally many tokens, of which each head reads `kept` pages."""

    sequences: Tensor
    queries: Tensor  # their tokens, one sequence behind the other
    pages: Tensor  # [sequences, pages], blocks
    own: Tensor  # [sequences, pages], whether the new tokens lie there
    absent: Tensor  # [sequences, pages], beyond the last
    kept: int


@dataclass(frozen=True)
class PagedStep:
    """Where the heads of a step's tokens lie, which pages of single heads begin with one, and who chooses pages."""

    slots: Tensor
    begun: Tensor
    selections: tuple[Selection, ...]


class ComposedByHead(PagedKernels, ABC):
    """`ByHeadKernels` by kernels that read the same tokens for all heads of a sequence."""

    _last: tuple[RaggedBatch, tuple[int, ...], HeadBatch] | None = None
    _last_paged: tuple[RaggedBatch, tuple[int, ...], PagedStep] | None = None

    def rope_and_store_by_head(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: HeadBlocks, slots: Tensor | None = None
    ) -> Tensor:
        by_head = self._by_head(batch, kv)
        at = by_head.batch
        if slots is not None:
            at = replace(at, slots=head_slots(slots, kv).flatten()[by_head.order])
        flat = per_head_qkv(qkv, kv.heads, kv.head_dim).index_select(0, by_head.order)
        if kv.quantized is None:
            q = self.rope_and_store(flat, cos, sin, at, kv.k, kv.v)
        else:
            q = self.rope_and_store_quantized(flat, cos, sin, at, kv.quantized)
        turned = torch.empty_like(q)
        turned[by_head.order] = q
        return turned.view(qkv.shape[0], -1, kv.head_dim)

    def attention_by_head(
        self,
        q: Tensor,
        kv: HeadBlocks,
        batch: RaggedBatch,
        scale: float,
        *,
        softcap: float | None = None,
        tables: Tensor | None = None,
    ) -> Tensor:
        by_head = self._by_head(batch, kv)
        at = by_head.batch if tables is None else replace(by_head.batch, block_table=head_tables(tables, kv))
        flat = q.view(-1, q.shape[1] // kv.heads, kv.head_dim).index_select(0, by_head.order)
        if kv.quantized is None:
            seen = self.attention(flat, kv.k, kv.v, at, scale, softcap=softcap)
        else:
            seen = self.attention_quantized(flat, kv.quantized, at, scale, softcap=softcap)
        out = torch.empty_like(seen)
        out[by_head.order] = seen
        return out.view(q.shape[0], -1)

    def add_attention_received(
        self,
        q: Tensor,
        kv: HeadBlocks,
        batch: RaggedBatch,
        scale: float,
        scores: Tensor,
        *,
        softcap: float | None = None,
    ) -> None:
        by_head, keys = self._by_head(batch, kv), kv.quantized or kv.k
        flat = q.view(-1, q.shape[1] // kv.heads, kv.head_dim).index_select(0, by_head.order)
        seen = self.attention_scores(flat, keys, by_head.batch, scale, queries=1, softcap=softcap)
        width = min(seen.shape[-1], scores.shape[-1])
        scores[_seats(batch), :, :width] += seen.view(batch.num_sequences, kv.heads, -1)[..., :width]

    def choose_places(self, batch: RaggedBatch, held: HeldTokens, block_size: int) -> Tensor:
        seats, head = _seats(batch)[:, None], torch.arange(held.order.shape[1], device=batch.slots.device)
        newest = batch.positions[:, None]
        place = held.order[seats, head, batch.slots[:, None]].long()  # [tokens, kv_heads]
        if held.scores is not None:
            known, scores = (state[seats[:, 0], :, : held.budget] for state in (held.positions, held.scores))
            stays = known > (newest - held.recent)[:, None]
            lowest = torch.where(stays, known.float(), -1 / (1 + scores)).argmin(dim=-1)
            place = torch.where(newest >= held.budget, lowest, place)
            held.scores[seats, head, place] = 0.0
        held.positions[seats, head, place] = newest.int().expand_as(place)
        return batch.block_table[:, :1].long() * block_size + place

    def choose_pages(self, q: Tensor, kv: HeadBlocks, bounds: PageBounds, batch: RaggedBatch, width: int) -> Tensor:
        step = self._paged(batch, kv, bounds)
        widen_bounds(bounds, kv, step.slots, step.begun)
        tables = torch.zeros(batch.num_sequences, kv.heads, width, dtype=torch.int32, device=q.device)
        there = min(width, batch.block_table.shape[1])
        tables[:, :, :there] = batch.block_table[:, None, :there]
        for chosen in step.selections:
            count, kept = len(chosen.sequences), chosen.kept
            queries = (
                q.index_select(0, chosen.queries).float().view(count, -1, kv.heads, q.shape[1] // kv.heads, q.shape[2])
            )
            queries = queries.transpose(1, 2).flatten(2, 3)  # [sequences, kv_heads, new * group, D]
            signed = torch.cat([queries.clamp(min=0), (-queries).clamp_(min=0)], dim=-1)
            known = bounds.numbers.index_select(0, chosen.pages.flatten()).unflatten(0, chosen.pages.shape)
            best = (signed @ known.permute(0, 2, 3, 1).float()).amax(dim=2)  # [sequences, kv_heads, pages]
            best.masked_fill_(chosen.absent[:, None], -torch.inf).masked_fill_(chosen.own[:, None], torch.inf)
            found = best.topk(kept, dim=2, sorted=False).indices.sort(dim=2).values
            read = chosen.pages[:, None].expand(-1, kv.heads, -1).gather(2, found)
            tables[chosen.sequences] = functional.pad(read, (0, width - kept)).int()
        return tables

    def _by_head(self, batch: RaggedBatch, kv: HeadBlocks) -> HeadBatch:
        """The batch by head: made once for all operations and layers of a step."""
        asked = kv.heads, kv.each, kv.apart, kv.block_size
        if self._last is None or self._last[0] is not batch or self._last[1] != asked:
            self._last = batch, asked, head_batch(batch, kv)
        return self._last[2]

    def _paged(self, batch: RaggedBatch, kv: HeadBlocks, bounds: PageBounds) -> PagedStep:
        """What choosing pages asks of the host, once for all layers of a step."""
        asked = kv.heads, bounds.pages, kv.block_size
        if self._last_paged is None or self._last_paged[0] is not batch or self._last_paged[1] != asked:
            self._last_paged = batch, asked, paged_step(batch, kv, bounds)
        return self._last_paged[2]


def per_head_qkv(qkv: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """qkv [tokens, (heads + 2 * kv_heads) * head_dim] as [tokens * kv_heads, (heads / kv_heads + 2) * head_dim]."""
    width = kv_heads * head_dim
    q, k, v = qkv.split([qkv.shape[1] - 2 * width, width, width], dim=1)
    parts = [part.unflatten(1, (kv_heads, -1)) for part in (q, k, v)]
    return torch.cat(parts, dim=-1).flatten(0, 1)


def head_batch(batch: RaggedBatch, kv: HeadBlocks) -> HeadBatch:
    """Each head of a sequence as a sequence, those of the first sequence first."""
    heads, edges, device = kv.heads, batch.query_start.tolist(), batch.positions.device
    parts = [
        torch.arange(first * heads, last * heads, device=device).view(-1, heads).t().flatten()
        for first, last in pairwise(edges)
    ]
    order = torch.cat(parts)
    new = (batch.query_start[1:] - batch.query_start[:-1]).repeat_interleave(heads)
    by_head = RaggedBatch(
        positions=batch.positions.repeat_interleave(heads)[order],
        slots=head_slots(batch.slots[:, None], kv).flatten()[order],
        query_start=torch.cat([new.new_zeros(1), new.cumsum(0)]).int(),
        context_len=batch.context_len.repeat_interleave(heads),
        block_table=head_tables(batch.block_table[:, None], kv),
        most_queries=batch.most_queries,
        tree=None if batch.tree is None else batch.tree.repeat_interleave(heads)[order],
    )
    return HeadBatch(by_head, order)


def head_slots(slots: Tensor, kv: HeadBlocks) -> Tensor:
    """Slots [tokens, kv_heads, or 1 where they are the same for all] in single heads' blocks: [tokens, kv_heads]."""
    head, size = torch.arange(kv.heads, device=slots.device), kv.block_size
    return (slots // size * kv.each + head * kv.apart) * size + slots % size


def head_tables(tables: Tensor, kv: HeadBlocks) -> Tensor:
    """Blocks [sequences, kv_heads or 1, width] as those of single heads: [sequences * kv_heads, width]."""
    head = torch.arange(kv.heads, device=tables.device)[:, None]
    return (tables.long() * kv.each + head * kv.apart).flatten(0, 1).int()


def paged_step(batch: RaggedBatch, kv: HeadBlocks, bounds: PageBounds) -> PagedStep:
    """Of a batch whose contexts are those of what is read: how long its sequences are, their positions say."""
    size, device, edges = kv.block_size, batch.positions.device, batch.query_start.tolist()
    slots = head_slots(batch.slots[:, None], kv).flatten()
    starts = batch.positions[batch.query_start[:-1].long()].tolist()
    new = [last - first for first, last in pairwise(edges)]
    selections = []
    for count in sorted(set(new)):
        chosen = [i for i, start in enumerate(starts) if new[i] == count and bounds.selects(count, start + count, size)]
        if not chosen:
            continue
        first = torch.tensor([starts[i] for i in chosen], device=device)[:, None]
        last, sequences = (first + count - 1) // size, torch.tensor(chosen, device=device)
        tokens = torch.tensor([edges[i] for i in chosen], device=device)[:, None] + torch.arange(count, device=device)
        pages = batch.block_table[sequences].long()
        place = torch.arange(pages.shape[1], device=device)
        own = (place >= first // size) & (place <= last)
        selections.append(Selection(sequences, tokens.flatten(), pages, own, place > last, bounds.kept(count, size)))
    return PagedStep(slots, slots[slots % size == 0] // size, tuple(selections))


def widen_bounds(bounds: PageBounds, kv: HeadBlocks, slots: Tensor, begun: Tensor) -> None:
    """The keys in `slots` of single heads' blocks count for the bounds of their pages; those of `begun` begin anew."""
    numbers = bounds.numbers.flatten(0, 1)
    if len(begun):
        numbers[begun] = -torch.inf
    keys = kv.keys(slots).to(numbers.dtype)
    index = (slots // kv.block_size)[:, None].expand(-1, numbers.shape[1])
    numbers.scatter_reduce_(0, index, torch.cat([keys, -keys], dim=1), "amax")


def _seats(batch: RaggedBatch) -> Tensor:
    if batch.seats is None:
        return torch.arange(batch.num_sequences, device=batch.positions.device)
    return batch.seats
