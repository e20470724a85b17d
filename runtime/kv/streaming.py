"""How does StreamingLLM keep the first tokens of a sequence and the newest ones?

Source: Xiao et al., Efficient streaming language models with attention sinks, ICLR 2024. Tokens keep the positions at
which they stood in the text, which the model's context must hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.techniques import KvBudget
from membound.runtime.kv.scratch import prompt_scratch
from membound.runtime.kv.steps import LastStep, PlacedBatch, PromptPart, SeatedStep, SeatStore
from membound.runtime.kv.store import NewPages
from membound.runtime.rope import RopeTables

BLOCK = 16  # tokens that the kernels read together


@dataclass(frozen=True)
class StreamingStep:
    """A step and its part that decodes, as it lies at the seats; None where nothing does."""

    seated: SeatedStep
    decoding: PlacedBatch | None


class StreamingKv(SeatStore):
    """At each seat the first `sinks` tokens, and a ring of the newest: which is the same for all layers and heads."""

    on_host = True

    def __init__(
        self,
        new_pages: NewPages,
        attention: GroupedQueryAttention,
        budget: KvBudget,
        seats: int,
        steps: LastStep[StreamingStep],
    ) -> None:
        self.steps, self.heads = steps, attention.kv_heads
        self.budget, self.sinks = budget.tokens, budget.sinks
        self.blocks = -(-budget.tokens // BLOCK)  # of one seat
        self.kv = new_pages(attention, seats * self.blocks, BLOCK)

    @property
    def emulated(self) -> bool:
        return self.kv.emulated

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.kv.parts

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def placed(self, batch: RaggedBatch) -> RaggedBatch:
        step = self.steps.of(batch, lambda: self._step(batch))
        return batch if step.seated.prompts or step.decoding is None else step.decoding

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        placed = batch if isinstance(batch, PlacedBatch) else self.placed(batch)
        if isinstance(placed, PlacedBatch):
            return self.kv.attend(qkv, rope, placed, scale, softcap)
        step = self.steps.of(batch, lambda: self._step(batch))
        out: Tensor | None = None
        for part in step.seated.prompts:
            attended = self._prompt(qkv[part.first : part.last], rope, part, scale, softcap)
            out = attended.new_empty(qkv.shape[0], attended.shape[1]) if out is None else out
            out[part.first : part.last] = attended
        assert out is not None, "there was a prompt"
        if step.decoding is not None and step.seated.rows is not None:
            rows = step.seated.rows
            out[rows] = self.kv.attend(qkv[rows], rope, step.decoding, scale, softcap)
        return out

    def place_of(self, positions: Tensor) -> Tensor:
        """Where a token lies at its seat: the sinks in front, the others in a ring."""
        ring = self.sinks + (positions - self.sinks) % (self.budget - self.sinks)
        return torch.where(positions < self.sinks, positions, ring)

    def _step(self, batch: RaggedBatch) -> StreamingStep:
        seated = SeatedStep.of(batch)
        seats, positions = seated.seats, seated.positions
        if not len(seats):
            return StreamingStep(seated, None)
        first = seats * self.blocks
        decoding = PlacedBatch(
            positions=positions,
            slots=first * BLOCK + self.place_of(positions),
            query_start=torch.arange(len(seats) + 1, dtype=torch.int32, device=seats.device),
            context_len=(positions + 1).clamp(max=self.budget).int(),
            block_table=(first[:, None] + torch.arange(self.blocks, device=seats.device)).int(),
            most_queries=1,
            seats=seats,
        )
        return StreamingStep(seated, decoding)

    def _prompt(self, qkv: Tensor, rope: RopeTables, part: PromptPart, scale: float, softcap: float | None) -> Tensor:
        """Attention of a chunk to what was kept before it and to itself; of its tokens those stay that are not old."""
        first, held = part.seat * self.blocks * BLOCK, min(part.start, self.budget)
        scratch = prompt_scratch(qkv.shape[0], part.start, held, BLOCK, self.kv, self.heads)
        before = torch.arange(held, device=qkv.device)
        scratch.kv.put(before, self.kv.tokens(first + before))
        attended = scratch.kv.attend(qkv, rope, scratch.batch, scale, softcap)
        positions = scratch.batch.positions
        oldest = part.start + qkv.shape[0] - (self.budget - self.sinks)
        stays = torch.nonzero((positions < self.sinks) | (positions >= oldest)).flatten()
        self.kv.put(first + self.place_of(positions[stays]), scratch.kv.tokens(held + stays))
        return attended
