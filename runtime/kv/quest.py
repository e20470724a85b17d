"""How does a step of decode read only the pages of its cache that matter to its query?

Source: Tang et al., Quest, ICML 2024, section 3: the least and the largest of each channel's keys bound what any token
of a page can score, so pages are ranked without reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.techniques import KvBudget
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.kv.per_head import per_head_qkv
from membound.runtime.kv.scratch import spans
from membound.runtime.kv.steps import LastStep
from membound.runtime.kv.store import NewPages, move_slots
from membound.runtime.rope import RopeTables

MOST_SELECTING = 33  # new tokens of a sequence that decodes or verifies drafts; a prompt reads all of its pages


@dataclass(frozen=True)
class Selection:
    """Heads of sequences that bring equally many tokens and read `kept` of their pages: those of the new tokens, and of
    the others the best."""

    rows: Tensor  # [rows], in the batch by head
    queries: Tensor  # [rows * new], tokens of the batch by head
    pages: Tensor  # [rows, pages], blocks of heads
    own: Tensor  # [rows, pages], whether the new tokens lie there
    absent: Tensor  # [rows, pages], beyond the last
    kept: int


@dataclass(frozen=True)
class QuestStep:
    """A step in which each head of a sequence is a sequence: what is common to all layers.

    Its `batch` reads all pages; with `selections` it has the contexts of those that are chosen, and their tables are
    still to be filled. `order` says where each token's heads went. The tokens' slots are in `pages_written`, of which
    those of `begun` have their first token.
    """

    batch: RaggedBatch
    order: Tensor
    pages_written: Tensor
    begun: Tensor
    selections: tuple[Selection, ...]


class QuestKv:
    """All K and V in blocks, which are the pages, with the bounds of each page's keys; each KV head chooses its own.

    A head of a block is a block of its own for the kernels, so that heads may read different ones. `bounds`
    [blocks * heads, 2 * head_dim] are the largest of each page's keys, and the largest of their negatives. Those of a
    page that is written again, after rejected drafts, may be wider than need be and never narrower.
    """

    on_host = True

    def __init__(
        self,
        new_pages: NewPages,
        attention: GroupedQueryAttention,
        budget: KvBudget,
        num_blocks: int,
        block_size: int,
        steps: LastStep[QuestStep],
    ) -> None:
        heads, width = attention.kv_heads, attention.head_dim
        self.heads, self.width, self.block_size, self.steps = heads, width, block_size, steps
        self.pages = max(2, budget.tokens // block_size)
        self.kv = new_pages(attention.model_copy(update={"kv_heads": 1}), num_blocks * heads, block_size)
        device = self.kv.parts[0].device
        self.bounds = torch.zeros(num_blocks * heads, 2 * width, dtype=self.kv.kernels.kv_dtype, device=device)

    @property
    def emulated(self) -> bool:
        return self.kv.emulated

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.kept)

    @property
    def kept(self) -> Sequence[Tensor]:
        return *self.kv.parts, self.bounds

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        step = self.steps.of(batch, lambda: self._step(batch))
        flat = per_head_qkv(qkv, self.heads, self.width).index_select(0, step.order)
        q = self.kv.write(flat, rope, step.batch)  # [tokens * heads, group, D]
        self._widen_bounds(step.batch.slots, step.pages_written, step.begun)
        attended = self.kv.read(q, self._chosen(q, step), scale, softcap)
        out = torch.empty_like(attended)
        out[step.order] = attended
        return out.view(qkv.shape[0], -1)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self.parts, blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self.parts, blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        parts = self.kv.parts
        by_token = [part.view(-1, self.heads, self.block_size, part.shape[-1]).transpose(1, 2) for part in parts]
        move_slots(by_token, sources, targets)
        slots = self._slots(targets).flatten()
        self._widen_bounds(slots, slots // self.block_size, slots[:0])

    @property
    def parts(self) -> list[Tensor]:
        """All that is kept, by the numbers of the scheduler's blocks."""
        return [part.view(-1, self.heads, *part.shape[1:]) for part in self.kept]

    def _slots(self, slots: Tensor) -> Tensor:
        """Where each head of the tokens in the scheduler's `slots` [tokens] lies: [tokens, heads]."""
        head, size = torch.arange(self.heads, device=slots.device), self.block_size
        return ((slots // size)[:, None] * self.heads + head) * size + (slots % size)[:, None]

    def _widen_bounds(self, slots: Tensor, pages: Tensor, begun: Tensor) -> None:
        """The keys in `slots`, which lie in `pages`, count for their bounds; those of `begun` pages begin anew."""
        if len(begun):
            self.bounds[begun] = -torch.inf
        keys = self.kv.keys(slots).to(self.bounds.dtype)
        index = pages[:, None].expand(-1, 2 * self.width)
        self.bounds.scatter_reduce_(0, index, torch.cat([keys, -keys], dim=1), "amax")

    def _chosen(self, q: Tensor, step: QuestStep) -> RaggedBatch:
        """The step's batch, of which every sequence that decodes reads its best pages and those of its new tokens.

        A query's products with a page's bounds are no less than its score with any token there.
        """
        if not step.selections:
            return step.batch
        table = step.batch.block_table.clone()
        for chosen in step.selections:
            queries = (
                q.index_select(0, chosen.queries).view(len(chosen.rows), -1, self.width).float()
            )  # [rows, new * group, D]
            signed = torch.cat([queries.clamp(min=0), (-queries).clamp_(min=0)], dim=-1)
            bounds = self.bounds.index_select(0, chosen.pages.flatten()).view(*chosen.pages.shape, -1)
            bound = signed @ bounds.float().transpose(1, 2)
            best = bound.amax(dim=1).masked_fill_(chosen.absent, -torch.inf).masked_fill_(chosen.own, torch.inf)
            found = best.topk(chosen.kept, dim=1, sorted=False).indices.sort(dim=1).values
            table[chosen.rows, : chosen.kept] = chosen.pages.gather(1, found).int()
        return replace(step.batch, block_table=table)

    def _step(self, batch: RaggedBatch) -> QuestStep:
        heads, size, device = self.heads, self.block_size, batch.positions.device
        order, edges = _by_sequence_and_head(batch, heads)
        head = torch.arange(heads, device=device)
        tables = (batch.block_table.long()[:, None] * heads + head[:, None]).flatten(
            0, 1
        )  # [sequences * heads, blocks]
        by_head = RaggedBatch(
            positions=batch.positions.repeat_interleave(heads)[order],
            slots=self._slots(batch.slots).flatten()[order],
            query_start=edges,
            context_len=batch.context_len.repeat_interleave(heads),
            block_table=tables.int(),
            most_queries=batch.most_queries,
            tree=None if batch.tree is None else batch.tree.repeat_interleave(heads)[order],
        )
        starts, ends = spans(by_head)
        contexts = list(ends)
        selections = []
        for new in sorted({end - start for start, end in zip(starts, ends, strict=True)}):
            kept = max(self.pages, (new - 2) // size + 2)  # so many pages may `new` tokens touch
            rows = [
                i
                for i, (start, end) in enumerate(zip(starts, ends, strict=True))
                if end - start == new <= MOST_SELECTING and start and -(-end // size) > kept
            ]
            if not rows:
                continue
            first, last = (torch.tensor([at[i] for i in rows], device=device)[:, None] for at in (starts, ends))
            first, last = first // size, (last - 1) // size
            for i in rows:
                contexts[i] = ends[i] - (-(-ends[i] // size) - kept) * size
            place, at = torch.arange(tables.shape[1], device=device), torch.tensor(rows, device=device)
            queries = (edges[at].long()[:, None] + torch.arange(new, device=device)).flatten()
            own = (place >= first) & (place <= last)
            selections.append(Selection(at, queries, tables[at], own, place > last, kept))
        pages, offset = by_head.slots // size, by_head.slots % size
        context_len = torch.tensor(contexts, dtype=torch.int32, device=device)
        return QuestStep(replace(by_head, context_len=context_len), order, pages, pages[offset == 0], tuple(selections))


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
