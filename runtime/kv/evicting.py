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
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.techniques import KvBudget
from membound.runtime.kv.per_head import head_batch, per_head_qkv
from membound.runtime.kv.policies import policy_of
from membound.runtime.kv.scratch import prompt_scratch
from membound.runtime.kv.steps import LastStep, PromptPart, SeatedStep
from membound.runtime.kv.store import NewPages
from membound.runtime.rope import RopeTables

BLOCK = 16  # tokens that the kernels read together
ONLY_HEAD = 0  # a block holds one


@dataclass(frozen=True)
class EvictingStep:
    """A step and what its part that decodes has in common in all layers, by sequence and head where both matter.

    `first` are the slots of each seat's heads. A token takes the place `held`, or where `full` says so that of the
    `turn`-th token to go since the cache was full.
    """

    seated: SeatedStep
    seats: Tensor  # [sequences, 1]
    newest: Tensor  # [sequences, 1, 1]
    held: Tensor  # [sequences, 1]
    full: Tensor  # [sequences, 1]
    some_full: bool
    turn: Tensor  # [sequences, 1]
    first: Tensor  # [sequences, heads]
    positions: Tensor  # [sequences * heads]
    context_len: Tensor  # [sequences * heads]
    block_table: Tensor  # [sequences * heads, blocks]


class EvictingKv:
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

    @property
    def emulated(self) -> bool:
        return self.kv.emulated

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.kept)

    @property
    def kept(self) -> Sequence[Tensor]:
        return *self.kv.parts, self.positions, self.scores, self.order

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        step = self.steps.of(batch, lambda: self._step(batch))
        seated = step.seated
        if not seated.prompts:
            return self._decode(qkv, rope, step, scale, softcap)
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * self.heads * self.width)
        if len(seated.seats) and seated.rows is not None:
            out[seated.rows] = self._decode(qkv[seated.rows], rope, step, scale, softcap)
        for part in seated.prompts:
            out[part.first : part.last] = self._prompt(qkv[part.first : part.last], rope, part, scale, softcap)
        return out

    @property
    def parts(self) -> tuple[Tensor, ...]:
        raise AssertionError("refused before: a cache of constant size has no blocks to move")

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        raise AssertionError("refused before: a cache of constant size has no blocks to move")

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        raise AssertionError("refused before: a cache of constant size has no blocks to move")

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        raise AssertionError("refused before: drafts and eviction exclude each other")

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
        """What a batch means at the seats; ends of prompts are the same in all layers."""
        seated = SeatedStep.of(batch)
        seats, start, heads = seated.seats, seated.positions, self.heads
        ends = torch.tensor([self.prompt_end[seat] for seat in seats.tolist()], dtype=torch.int64, device=seats.device)
        full = start >= self.budget
        first = (seats[:, None] * heads + torch.arange(heads, device=seats.device)) * self.blocks
        table = first.view(-1, 1) + torch.arange(self.blocks, device=seats.device)
        return EvictingStep(
            seated=seated,
            seats=seats[:, None],
            newest=start[:, None, None],
            held=start.clamp(max=self.budget)[:, None],
            full=full[:, None],
            some_full=bool(full.any()),
            turn=((start - ends.clamp(min=self.budget)) % self.budget)[:, None],
            first=first * BLOCK,
            positions=start.repeat_interleave(heads),
            context_len=(start + 1).clamp(max=self.budget).repeat_interleave(heads).int(),
            block_table=table.int(),
        )

    def _decode(self, qkv: Tensor, rope: RopeTables, step: EvictingStep, scale: float, softcap: float | None) -> Tensor:
        """Attention of one new token of each of some seats, which takes its place first."""
        place = self._places(step)  # [sequences, heads]
        batch = head_batch(step.positions, (step.first + place).flatten(), step.context_len, step.block_table)
        q = self.kv.write(per_head_qkv(qkv, self.heads, self.width), rope, batch)
        attended = self.kv.read(q, batch, scale, softcap)
        head = torch.arange(self.heads, device=qkv.device)
        self.positions[step.seats, head, place] = step.newest[:, 0].int()
        if self.policy.decode_scores:
            self.scores[step.seats, head, place] = 0.0
            seen = self.kv.received(q, batch, scale, 1, softcap)
            self.scores[step.seats[:, 0], :, : seen.shape[-1]] += seen.view(len(step.seats), self.heads, -1)
        return attended.view(len(step.seats), -1)

    def _places(self, step: EvictingStep) -> Tensor:
        """Where each head puts the new token: behind the others while there is room, else where one must go."""
        if not step.some_full:
            return step.held.expand(-1, self.heads)
        head = torch.arange(self.heads, device=step.seats.device)
        if not self.policy.decode_scores:
            lowest = self.order[step.seats, head, step.turn].long()
        else:
            seats = step.seats[:, 0]
            scores, positions = (state[seats, :, : self.budget] for state in (self.scores, self.positions))
            lowest = self.policy.rank(scores, positions, step.newest).argmin(dim=-1)
        return torch.where(step.full, lowest, step.held)
