"""How does a cache hold no more than so many tokens of each sequence?

It has a place of constant size at each seat instead of blocks. Tokens keep the positions at which they stood in the
text, and attention is the kernels': in a step of decode the order of what it reads does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.techniques import KvBudget
from membound.runtime.kv.per_head import head_batch, per_head_qkv
from membound.runtime.kv.policies import policy_of
from membound.runtime.kv.scratch import Scratch, seats_of, spans
from membound.runtime.rope import RopeTables

BLOCK = 16  # tokens that the kernels read together


class EvictingKv:
    """At each seat, for each KV head, the `budget` tokens that its policy ranks highest.

    A prompt sees what was kept before it and all of itself, and is evicted from when it is over. A token that decodes
    takes the place of the one that ranks lowest once there is no other.
    """

    emulated = False
    on_host = True

    def __init__(
        self, kernels: Kernels, attention: GroupedQueryAttention, budget: KvBudget, seats: int, device: torch.device
    ) -> None:
        heads, width = attention.kv_heads, attention.head_dim
        self.kernels, self.heads, self.width = kernels, heads, width
        self.policy, self.budget = policy_of(budget), budget.tokens
        self.blocks = -(-budget.tokens // BLOCK)  # of one head of one seat
        shape = (seats * heads * self.blocks, BLOCK, 1, width)
        self.k_blocks, self.v_blocks = (torch.zeros(shape, dtype=kernels.kv_dtype, device=device) for _ in range(2))
        places = (seats, heads, self.blocks * BLOCK)
        self.keys, self.values = (blocks.view(*places, width) for blocks in (self.k_blocks, self.v_blocks))
        self.positions = torch.zeros(places, dtype=torch.int32, device=device)
        self.scores = torch.zeros(places, device=device)
        self.held = torch.zeros(seats, dtype=torch.int64)  # tokens of each seat, the same for all heads
        self.prompt_end = torch.zeros(seats, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.k_blocks, self.v_blocks, self.positions, self.scores))

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        starts, ends = spans(batch)
        edges, seats = batch.query_start.tolist(), seats_of(batch)
        decoding = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if start and end - start == 1]
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * self.heads * self.width)
        if decoding:
            rows = torch.tensor([edges[i] for i in decoding], device=qkv.device)
            at = [starts[i] for i in decoding]
            out[rows] = self._decode(qkv[rows], rope, [seats[i] for i in decoding], at, scale, softcap)
        for i in range(len(starts)):
            if i not in decoding:
                part = slice(edges[i], edges[i + 1])
                out[part] = self._prompt(qkv[part], rope, seats[i], starts[i], scale, softcap)
        return out

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        raise AssertionError("refused before: a cache of constant size has no blocks to move")

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        raise AssertionError("refused before: a cache of constant size has no blocks to move")

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        raise AssertionError("refused before: drafts and eviction exclude each other")

    def _prompt(
        self, qkv: Tensor, rope: RopeTables, seat: int, start: int, scale: float, softcap: float | None
    ) -> Tensor:
        """Attention of a chunk of a prompt that begins at token `start`; what it leaves is cut down to the budget."""
        device, new = qkv.device, qkv.shape[0]
        held = int(self.held[seat]) if start else 0
        end = held + new
        batch = RaggedBatch(
            positions=torch.arange(start, start + new, device=device),
            slots=torch.arange(held, end, device=device),
            query_start=torch.tensor([0, new], dtype=torch.int32, device=device),
            context_len=torch.tensor([end], dtype=torch.int32, device=device),
            block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
            most_queries=new,
        )
        scratch = Scratch(batch, BLOCK, self.keys.permute(0, 2, 1, 3))
        keys, values = scratch.tokens(0)  # [tokens, heads, D]
        keys[:held], values[:held] = (kept[seat, :, :held].transpose(0, 1) for kept in (self.keys, self.values))
        blocks = scratch.k_blocks, scratch.v_blocks
        q = self.kernels.rope_and_store(qkv, rope.cos, rope.sin, scratch.batch, *blocks)
        attended = self.kernels.attention(q, *blocks, scratch.batch, scale, softcap=softcap)

        scores = torch.zeros(self.heads, end, device=device)
        if queries := self.policy.queries(new):
            seen = self.kernels.attention_scores(
                q, scratch.k_blocks, scratch.batch, scale, queries=queries, softcap=softcap
            )
            scores = self.policy.scores(seen[0])
        positions = torch.cat([self.positions[seat, :, :held], batch.positions.int().expand(self.heads, -1)], dim=1)
        scores[:, :held] += self.scores[seat, :, :held]
        self.prompt_end[seat] = start + new
        kept = min(end, self.budget)
        last = torch.full((1, 1), start + new, device=device)
        ranks = self.policy.rank(scores, positions, last, last - 1)
        chosen = ranks.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values if kept < end else None
        for state, full in ((self.positions, positions), (self.scores, scores)):
            state[seat, :, :kept] = full if chosen is None else full.gather(1, chosen)
        for state, full in ((self.keys, keys), (self.values, values)):
            by_head = full.transpose(0, 1)  # [heads, tokens, D]
            if chosen is not None:
                by_head = by_head.gather(1, chosen[..., None].expand(-1, -1, self.width))
            state[seat, :, :kept] = by_head
        self.held[seat] = kept
        return attended

    def _decode(
        self,
        qkv: Tensor,
        rope: RopeTables,
        seat_list: list[int],
        position_list: list[int],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one new token of each of some seats, at these positions; it takes its place first."""
        device, heads = qkv.device, self.heads
        seats, newest = torch.tensor(seat_list, device=device), torch.tensor(position_list, device=device)
        held = self.held[seats.cpu()].to(device)
        place = held[:, None].expand(-1, heads).clone()  # [sequences, heads]
        full = held >= self.budget
        if bool(full.any()):
            ranks = self.policy.rank(
                self.scores[seats, :, : self.budget],
                self.positions[seats, :, : self.budget],
                self.prompt_end[seats.cpu()].to(device)[:, None, None],
                newest[:, None, None],
            )
            place[full] = ranks.argmin(dim=-1)[full]
        held = torch.minimum(held + 1, torch.tensor(self.budget, device=device))
        self.held[seats.cpu()] = held.cpu()
        head = torch.arange(heads, device=device)
        self.positions[seats[:, None], head, place] = newest[:, None].int()
        self.scores[seats[:, None], head, place] = 0.0

        first = (seats[:, None] * heads + head) * self.blocks  # [sequences, heads], in blocks
        batch = head_batch(
            positions=newest.repeat_interleave(heads),
            slots=(first * BLOCK + place).flatten(),
            context_len=held.repeat_interleave(heads),
            block_table=first.view(-1, 1) + torch.arange(self.blocks, device=device),
        )
        blocks = self.k_blocks, self.v_blocks
        q = self.kernels.rope_and_store(per_head_qkv(qkv, heads, self.width), rope.cos, rope.sin, batch, *blocks)
        attended = self.kernels.attention(q, *blocks, batch, scale, softcap=softcap)
        if self.policy.decode_scores:
            seen = self.kernels.attention_scores(q, self.k_blocks, batch, scale, queries=1, softcap=softcap)
            self.scores[seats, :, : seen.shape[-1]] += seen.view(len(seat_list), heads, -1)
        return attended.view(len(seat_list), -1)
