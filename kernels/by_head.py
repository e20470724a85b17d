"""What must kernels promise for a cache whose KV heads hold, or read, tokens of their own?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from membound.kernels.kv_formats import QuantizedKv

if TYPE_CHECKING:
    from membound.kernels.base import RaggedBatch

MOST_SELECTING = 33  # new tokens of a sequence that decodes or verifies drafts; a prompt reads all of its pages


@dataclass(frozen=True, eq=False)
class HeadBlocks:
    """K and V in blocks of a single head: what a batch calls block b is, of head h, block `b * each + h * apart`.

    `k` and `v` are [blocks, block_size, 1, stored]; where they are `quantized` they are its parts.
    """

    k: Tensor
    v: Tensor
    quantized: QuantizedKv | None
    heads: int
    each: int
    apart: int

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] if self.quantized is None else self.quantized.head_dim

    def keys(self, slots: Tensor) -> Tensor:
        """The numbers [tokens, head_dim] that the keys in `slots` [tokens] of the single heads' blocks stand for."""
        codes = self.k.view(-1, self.k.shape[-1]).index_select(0, slots)
        if self.quantized is None:
            return codes
        codes, scales = codes[None, :, None], self.quantized.scales  # a block of all these tokens
        if self.quantized.format != "fp8":
            scales = scales.view(-1, scales.shape[-1]).index_select(0, slots)[None, None]
        return QuantizedKv(self.quantized.format, codes, codes, scales).dequantized()[0][0, :, 0]


@dataclass(frozen=True, eq=False)
class HeldTokens:
    """What a cache of constant size knows of the `budget` tokens that each KV head holds at a seat.

    `order` [seats, kv_heads, budget] (int32) are their places, that of the first to go first. Where ranks change in
    decode, `scores` [seats, kv_heads, places] is the attention that tokens received, and the lowest rank goes first: of
    the newest `recent` tokens their position, of the others -1 / (1 + score).
    """

    positions: Tensor  # [seats, kv_heads, places] int32
    order: Tensor
    scores: Tensor | None
    recent: int

    @property
    def budget(self) -> int:
        return self.order.shape[2]


@dataclass(frozen=True, eq=False)
class PageBounds:
    """Of each page's keys the largest, and the largest of their negatives: `numbers` [blocks, kv_heads, 2 * head_dim].

    A sequence that decodes reads `pages` pages, or as many as its new tokens touch.
    """

    numbers: Tensor
    pages: int

    def kept(self, new: int, block_size: int) -> int:
        """Of how many pages a sequence that brings `new` tokens reads the tokens."""
        return max(self.pages, (new - 2) // block_size + 2 if new > 1 else 1)

    def selects(self, new: int, end: int, block_size: int) -> bool:
        """Whether a sequence of `end` tokens, `new` of them new, reads fewer pages than it has."""
        return new < end and new <= MOST_SELECTING and -(-end // block_size) > self.kept(new, block_size)

    def widest(self, block_size: int) -> int:
        """The most pages that a sequence reads that does not bring a prompt."""
        return self.kept(MOST_SELECTING, block_size)


class ByHeadKernels(Protocol):
    """The part of `Kernels` for such caches; `composed_by_head.py` has its plain meaning."""

    def rope_and_store_by_head(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: HeadBlocks, slots: Tensor | None = None
    ) -> Tensor:
        """`Kernels.rope_and_store`, each head of a token at its slot of `slots` [tokens, kv_heads], or the batch's."""

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
        """`Kernels.attention`; each head of a sequence has the blocks of `tables` [sequences, kv_heads, any] (int32).

        Without them all heads have the batch's.
        """

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
        """Adds to `scores` [seats, kv_heads, places] the attention that the tokens of each seat receive of its newest.

        Of the newest token of each sequence alone: see `Kernels.attention_scores`.
        """

    def choose_places(self, batch: RaggedBatch, held: HeldTokens, block_size: int) -> Tensor:
        """Where each head of a token goes, one of each sequence: slots [tokens, kv_heads] (int64).

        `batch.slots` are entries of the order; where scores are kept and no place is free, the token with the lowest
        rank goes. A place that is taken has the position of the new token and a score of 0 from then on. A sequence's
        places lie behind one another from its first block on.
        """

    def choose_pages(self, q: Tensor, kv: HeadBlocks, bounds: PageBounds, batch: RaggedBatch, width: int) -> Tensor:
        """The blocks that each head of a sequence reads, in order: [sequences, kv_heads, width] (int32).

        The new tokens' keys count for the bounds of their pages first. A sequence that brings a prompt, or has no more
        pages, reads all; another those of its new tokens and the best of the others: no score of a query with a token
        is above its product with the bounds of the token's page. The batch's contexts are those of what is read.
        """
