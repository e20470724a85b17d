"""How does a cache keep, for each KV head, the tokens that received most attention?

It has a place of constant size at each seat instead of blocks. Tokens keep the positions at which they stood in the
text, and attention is the kernels': in a step of decode the order of what it reads does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.by_head import HeldTokens
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.techniques import KvBudget
from membound.runtime.kv.policies import policy_of
from membound.runtime.kv.scratch import prompt_scratch
from membound.runtime.kv.steps import LastStep, PlacedBatch, PromptPart, SeatedStep, SeatStore
from membound.runtime.kv.store import NewPages
from membound.runtime.rope import RopeTables

BLOCK = 16  # tokens that the kernels read together
ONLY_HEAD = 0  # a block holds one


@dataclass(frozen=True)
class EvictingStep:
    """A step and its part that decodes, whose slots are entries of the seats' orders; None where nothing does."""

    seated: SeatedStep
    decoding: PlacedBatch | None


class EvictingKv(SeatStore):
    """At each seat, for each KV head, the `budget` tokens that its policy ranks highest.

    A prompt sees what was kept before it and all of itself, and is evicted from when it is over. A token that decodes
    takes the place of the one that ranks lowest once there is no other: where ranks do not change in decode their order
    is known when the prompt is over.
    """

    on_host = True

    def __init__(
        self,
        new_pages: NewPages,
        attention: GroupedQueryAttention,
        budget: KvBudget,
        seats: int,
        steps: LastStep[EvictingStep],
    ) -> None:
        heads = attention.kv_heads
        self.heads, self.width, self.steps = heads, attention.head_dim, steps
        self.policy, self.budget = policy_of(budget), budget.tokens
        self.blocks = -(-budget.tokens // BLOCK)  # of one head of one seat
        self.kv = new_pages(attention.model_copy(update={"kv_heads": 1}), seats * heads * self.blocks, BLOCK)
        places, device = (seats, heads, self.blocks * BLOCK), self.kv.parts[0].device
        self.positions = torch.zeros(places, dtype=torch.int32, device=device)
        self.scores = torch.zeros(places, device=device)
        self.order = torch.zeros(
            seats, heads, self.budget, dtype=torch.int32, device=device
        )  # places, first to go first
        self.prompt_end = [0] * seats
        self._blocks = self.kv.by_head(heads, each=1, apart=self.blocks)
        scores = self.scores if self.policy.decode_scores else None
        self._held = HeldTokens(self.positions, self.order, scores, budget.recent)

    @property
    def emulated(self) -> bool:
        return self.kv.emulated

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.kept)

    @property
    def kept(self) -> Sequence[Tensor]:
        return *self.kv.parts, self.positions, self.scores, self.order

    def placed(self, batch: RaggedBatch) -> RaggedBatch:
        step = self.steps.of(batch, lambda: self._step(batch))
        return batch if step.seated.prompts or step.decoding is None else step.decoding

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        placed = batch if isinstance(batch, PlacedBatch) else self.placed(batch)
        if isinstance(placed, PlacedBatch):
            return self._decode(qkv, rope, placed, scale, softcap)
        step = self.steps.of(batch, lambda: self._step(batch))
        seated = step.seated
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * self.heads * self.width)
        if step.decoding is not None and seated.rows is not None:
            out[seated.rows] = self._decode(qkv[seated.rows], rope, step.decoding, scale, softcap)
        for part in seated.prompts:
            out[part.first : part.last] = self._prompt(qkv[part.first : part.last], rope, part, scale, softcap)
        return out

    def _prompt(self, qkv: Tensor, rope: RopeTables, part: PromptPart, scale: float, softcap: float | None) -> Tensor:
        """Attention of a chunk of a prompt; what it leaves is cut down to the budget."""
        device, seat, new = qkv.device, part.seat, qkv.shape[0]
        held = min(part.start, self.budget)
        end = held + new
        scratch = prompt_scratch(new, part.start, held, BLOCK, self.kv, self.heads)
        head, places = torch.arange(self.heads, device=device)[:, None], torch.arange(self.budget, device=device)
        slots = (seat * self.heads + head) * self.blocks * BLOCK + places  # [heads, budget]
        scratch.kv.put(places[:held], self.kv.tokens(slots[:, :held], ONLY_HEAD), head)
        q = scratch.kv.write(qkv, rope, scratch.batch)
        attended = scratch.kv.read(q, scratch.batch, scale, softcap)

        seen = scratch.kv.received(q, scratch.batch, scale, self.policy.queries(new), softcap)
        scores = self.policy.scores(seen[0, :, :end])
        scores[:, :held] += self.scores[seat, :, :held]
        positions = torch.cat(
            [self.positions[seat, :, :held], scratch.batch.positions.int().expand(self.heads, -1)], dim=1
        )
        kept = min(end, self.budget)
        ranks = self.policy.rank(scores, positions, torch.tensor(part.start + new - 1, device=device))
        chosen = ranks.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values  # [heads, kept]
        self.positions[seat, :, :kept] = positions.gather(1, chosen)
        self.scores[seat, :, :kept] = scores.gather(1, chosen)
        self.kv.put(slots[:, :kept], scratch.kv.tokens(chosen, head), ONLY_HEAD)
        self.order[seat, :, :kept] = ranks.gather(1, chosen).argsort(dim=1).int()
        self.order[seat, :, kept:] = torch.arange(kept, self.budget, dtype=torch.int32, device=device)
        self.prompt_end[seat] = part.start + new
        return attended

    def _step(self, batch: RaggedBatch) -> EvictingStep:
        """Where a step's tokens lie; ends of prompts are the same in all layers."""
        seated = SeatedStep.of(batch)
        seats, start = seated.seats, seated.positions
        if not len(seats):
            return EvictingStep(seated, None)
        ends = torch.tensor([self.prompt_end[seat] for seat in seats.tolist()], dtype=torch.int64, device=seats.device)
        first = seats[:, None] * self.heads * self.blocks
        decoding = PlacedBatch(
            positions=start,
            # The free place, or where there is none the turn of the token since the cache was full.
            slots=torch.where(start < self.budget, start, (start - ends.clamp(min=self.budget)) % self.budget),
            query_start=torch.arange(len(seats) + 1, dtype=torch.int32, device=seats.device),
            context_len=(start + 1).clamp(max=self.budget).int(),
            block_table=(first + torch.arange(self.blocks, device=seats.device)).int(),
            most_queries=1,
            seats=seats,
        )
        return EvictingStep(seated, decoding)

    def _decode(self, qkv: Tensor, rope: RopeTables, batch: PlacedBatch, scale: float, softcap: float | None) -> Tensor:
        """Attention of one new token of each of some seats, which takes its place first."""
        kernels, blocks = self.kv.kernels, self._blocks
        slots = kernels.choose_places(batch, self._held, BLOCK)  # [sequences, heads]
        q = kernels.rope_and_store_by_head(qkv, rope.cos, rope.sin, batch, blocks, slots)
        attended = kernels.attention_by_head(q, blocks, batch, scale, softcap=softcap)
        if self._held.scores is not None:
            kernels.add_attention_received(q, blocks, batch, scale, self._held.scores, softcap=softcap)
        return attended
