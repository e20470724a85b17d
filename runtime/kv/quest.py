"""How does a step of decode read only the pages of its cache that matter to its query?

Source: Tang et al., Quest, ICML 2024, section 3: the least and the largest of each channel's keys bound what any token
of a page can score, so pages are ranked without reading them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.by_head import MOST_SELECTING, PageBounds
from membound.kernels.composed_by_head import head_slots, widen_bounds
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.techniques import KvBudget
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.kv.scratch import spans
from membound.runtime.kv.steps import LastStep, PlacedBatch, PlacingStore
from membound.runtime.kv.store import NewPages, move_slots
from membound.runtime.rope import RopeTables


class QuestKv(PlacingStore):
    """All K and V in blocks, which are the pages, with the bounds of each page's keys; each KV head chooses its own.

    A head of a block is a block of its own for the kernels, so that heads may read different ones. `bounds`
    [blocks, heads, 2 * head_dim] are the largest of each page's keys, and the largest of their negatives. Those of a
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
        steps: LastStep[RaggedBatch],
    ) -> None:
        heads, width = attention.kv_heads, attention.head_dim
        self.heads, self.block_size, self.steps = heads, block_size, steps
        self.kv = new_pages(attention.model_copy(update={"kv_heads": 1}), num_blocks * heads, block_size)
        device = self.kv.parts[0].device
        self.bounds = torch.zeros(num_blocks, heads, 2 * width, dtype=self.kv.kernels.kv_dtype, device=device)
        self._blocks = self.kv.by_head(heads, each=heads, apart=1)
        self._pages = PageBounds(self.bounds, max(2, budget.tokens // block_size))

    @property
    def emulated(self) -> bool:
        return self.kv.emulated

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.kept)

    @property
    def kept(self) -> Sequence[Tensor]:
        return *self.kv.parts, self.bounds

    def placed(self, batch: RaggedBatch) -> RaggedBatch:
        step = self.steps.of(batch, lambda: self._step(batch))
        return step if isinstance(step, PlacedBatch) else batch

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        step = batch if isinstance(batch, PlacedBatch) else self.steps.of(batch, lambda: self._step(batch))
        kernels, blocks, table = self.kv.kernels, self._blocks, step.block_table
        width = self._pages.widest(self.block_size) if isinstance(step, PlacedBatch) else table.shape[1]
        q = kernels.rope_and_store_by_head(qkv, rope.cos, rope.sin, step, blocks)
        chosen = kernels.choose_pages(q, blocks, self._pages, step, width)
        return kernels.attention_by_head(q, blocks, step, scale, softcap=softcap, tables=chosen)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self.parts, blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self.parts, blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        parts = self.kv.parts
        by_token = [part.view(-1, self.heads, self.block_size, part.shape[-1]).transpose(1, 2) for part in parts]
        move_slots(by_token, sources, targets)
        slots = head_slots(targets[:, None], self._blocks).flatten()
        widen_bounds(self._pages, self._blocks, slots, slots[:0])

    @property
    def parts(self) -> list[Tensor]:
        """All that is kept, by the numbers of the scheduler's blocks."""
        return [*(part.view(-1, self.heads, *part.shape[1:]) for part in self.kv.parts), self.bounds]

    def _step(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch with contexts of what is read of each sequence; without prompts it is a PlacedBatch."""
        starts, ends = spans(batch)
        contexts, size = list(ends), self.block_size
        prompts = False
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            prompts |= not start or end - start > MOST_SELECTING
            if self._pages.selects(end - start, end, size):
                contexts[i] -= (-(-end // size) - self._pages.kept(end - start, size)) * size
        made = RaggedBatch if prompts else PlacedBatch
        return made(
            positions=batch.positions,
            slots=batch.slots,
            query_start=batch.query_start,
            context_len=torch.tensor(contexts, dtype=torch.int32, device=batch.positions.device),
            block_table=batch.block_table,
            most_queries=batch.most_queries,
            seats=batch.seats,
            tree=batch.tree,
        )
