"""How does KIVI keep keys and values in 2 or 4 bits while a sequence grows?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.kivi import KiviBlocks
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.precision import Precision
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.kv.scratch import Scratch, seats_of
from membound.runtime.kv.store import PlainKv
from membound.runtime.rope import RopeTables


class KiviKv:
    """Of a sequence at most `window` tokens are in bf16, at its seat, and the others in codes in its blocks.

    Whenever they would be more, the oldest group of them is rounded. A few new tokens are attended to where they are
    kept; those of a prompt while they are still exact, in a copy. On kernels that emulate this a
    step unpacks all that it reads, so its time means nothing.
    """

    def __init__(
        self,
        kernels: Kernels,
        attention: GroupedQueryAttention,
        format: Precision,
        num_blocks: int,
        block_size: int,
        seats: int,
        device: torch.device,
    ) -> None:
        (scale,) = format.scales
        self.kernels = kernels
        self.emulated = kernels.emulates_kivi
        self.seen = attention.window
        shape = (num_blocks, block_size, attention.kv_heads, attention.head_dim)
        self.kv = KiviBlocks.zeros(format.width, scale.columns, format.window, *shape, seats, device)

    @property
    def on_host(self) -> bool:
        """Whether the host must know how long each sequence is."""
        return self.emulated

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    @property
    def kept(self) -> Sequence[Tensor]:
        return *self.kv.parts, self.kv.recent_keys, self.kv.recent_values, self.kv.rounded

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        if batch.queries_at_most > self.kv.most_new:
            return self._attend_to_copy(qkv, rope, batch, scale, softcap)
        kv, kernels = self.kv, self.kernels
        kernels.kivi_make_room(kv, batch)
        recent = replace(batch, slots=kv.slots(batch))
        q = kernels.rope_and_store(qkv, rope.cos, rope.sin, recent, kv.recent_keys, kv.recent_values)
        return kernels.attention_kivi(q, kv, batch, scale, window=self.seen, softcap=softcap)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.kv.parts

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self.parts, blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self.parts, blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        raise AssertionError("drafts that must move are refused: tokens in codes share scales with their neighbours")

    def _attend_to_copy(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None
    ) -> Tensor:
        recent = PlainKv(self.kernels, self.kv.recent_keys, self.kv.recent_values, self.seen)
        scratch = Scratch(batch, self.kv.block_size, recent, recent.k_blocks.shape[-2])
        seats = seats_of(batch)
        for i, (seat, start) in enumerate(zip(seats, scratch.starts, strict=True)):
            if start:
                keys, values = scratch.tokens(i)
                keys[:start], values[:start] = self.kv.tokens(batch.block_table[i], seat, start)
        attended = scratch.kv.attend(qkv, rope, scratch.batch, scale, softcap)
        for i, (seat, start) in enumerate(zip(seats, scratch.starts, strict=True)):
            self.kv.keep(batch.block_table[i], seat, *scratch.tokens(i), start)
        return attended
