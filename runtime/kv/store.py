"""Where do K and V of a layer's tokens lie, and how is attention computed over them?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.by_head import HeadBlocks
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.rope import RopeTables

Heads = Tensor | slice | int  # which KV heads, beside an index of tokens
ALL_HEADS = slice(None)


class KvStore(Protocol):
    """The cache of one attention layer.

    What it keeps for a block can be read as bytes and written back elsewhere: to another block of the same store
    (copy-on-write), to the host (swap), or to another process (disaggregation).
    """

    @property
    def emulated(self) -> bool:
        """Whether its time means nothing, because it attends to an unpacked copy of what it keeps."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, whether or not they are in use."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """What lies in blocks, [blocks, ...] each."""

    @property
    def kept(self) -> Sequence[Tensor]:
        """All that it knows of the tokens that it was given, wherever it lies."""

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Rotates q and k of qkv [tokens, (heads + 2 * kv_heads) * head_dim], stores k and v, attends causally.

        A token sees what the window of the layer's attention holds; `softcap` caps the scores. Returns
        [tokens, heads * head_dim].
        """

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """A copy of what is kept for these blocks, as bytes [blocks, bytes_per_block]."""

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        """Puts what `read_blocks` of an equal store returned into these blocks."""

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        """Copies what is kept for the tokens in slots `sources` to `targets`, both [tokens]; they may overlap."""


class PagedKv(ABC):
    """K and V in blocks that the kernels write and read as they are stored; with a `window`, of the newest tokens.

    Stores that choose what they keep or read have one as the place where it lies, and another as a scratch: what they
    move from one to the other moves as it is stored.
    """

    def __init__(self, kernels: Kernels, window: int | None) -> None:
        self.kernels = kernels
        self.window = window

    @property
    def emulated(self) -> bool:
        return False

    @property
    @abstractmethod
    def parts(self) -> Sequence[Tensor]:
        """What lies in blocks, [blocks, ...] each."""

    @property
    @abstractmethod
    def by_token(self) -> Sequence[Tensor]:
        """The same as views [blocks, block_size, kv_heads, ...]."""

    @abstractmethod
    def write(self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch) -> Tensor:
        """Rotates q and k of qkv [tokens, (heads + 2 * kv_heads) * head_dim], stores k and v, returns q."""

    @abstractmethod
    def read(self, q: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None) -> Tensor:
        """Attention of q [tokens, heads, head_dim] to what the batch's sequences have here."""

    @abstractmethod
    def received(self, q: Tensor, batch: RaggedBatch, scale: float, queries: int, softcap: float | None) -> Tensor:
        """The attention that each token receives of a sequence's last `queries`: see `Kernels.attention_scores`."""

    @abstractmethod
    def by_head(self, heads: int, each: int, apart: int) -> HeadBlocks:
        """Blocks of one head as the kernels see those of `heads` heads: see `HeadBlocks`."""

    @abstractmethod
    def empty(self, blocks: int, block_size: int, kv_heads: int) -> PagedKv:
        """Blocks of the same kind and window, for other heads of the same width."""

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        return self.read(self.write(qkv, rope, batch), batch, scale, softcap)

    def tokens(self, slots: Tensor, heads: Heads = ALL_HEADS) -> list[Tensor]:
        """Of each part what is kept for the tokens in `slots`, of some KV heads as both index: [..., width]."""
        return [part[slots // part.shape[1], slots % part.shape[1], heads] for part in self.by_token]

    def put(self, slots: Tensor, content: Sequence[Tensor], heads: Heads = ALL_HEADS) -> None:
        """Puts what `tokens` of blocks of the same kind returned into other slots."""
        for part, piece in zip(self.by_token, content, strict=True):
            part[slots // part.shape[1], slots % part.shape[1], heads] = piece

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self.parts, blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self.parts, blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        move_slots(self.by_token, sources, targets)


class PlainKv(PagedKv):
    """K and V as the kernels keep them, [blocks, block_size, kv_heads, head_dim] each."""

    def __init__(self, kernels: Kernels, k_blocks: Tensor, v_blocks: Tensor, window: int | None = None) -> None:
        super().__init__(kernels, window)
        self.k_blocks = k_blocks
        self.v_blocks = v_blocks

    @classmethod
    def zeroed(
        cls, kernels: Kernels, attention: GroupedQueryAttention, num_blocks: int, block_size: int, device: torch.device
    ) -> PlainKv:
        """A store whose blocks are zero, in huge pages on a CPU."""
        shape = (num_blocks, block_size, attention.kv_heads, attention.head_dim)
        if device.type == "cpu":
            arena = Arena()
            k, v = (arena.empty(shape, kernels.kv_dtype) for _ in range(2))
        else:
            k, v = (torch.zeros(shape, dtype=kernels.kv_dtype, device=device) for _ in range(2))
        return cls(kernels, k, v, attention.window)

    @property
    def parts(self) -> Sequence[Tensor]:
        return self.k_blocks, self.v_blocks

    @property
    def by_token(self) -> Sequence[Tensor]:
        return self.parts

    def write(self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch) -> Tensor:
        return self.kernels.rope_and_store(qkv, rope.cos, rope.sin, batch, self.k_blocks, self.v_blocks)

    def read(self, q: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None) -> Tensor:
        k, v = self.k_blocks, self.v_blocks
        return self.kernels.attention(q, k, v, batch, scale, window=self.window, softcap=softcap)

    def received(self, q: Tensor, batch: RaggedBatch, scale: float, queries: int, softcap: float | None) -> Tensor:
        return self.kernels.attention_scores(q, self.k_blocks, batch, scale, queries=queries, softcap=softcap)

    def by_head(self, heads: int, each: int, apart: int) -> HeadBlocks:
        return HeadBlocks(self.k_blocks, self.v_blocks, None, heads, each, apart)

    def empty(self, blocks: int, block_size: int, kv_heads: int) -> PlainKv:
        shape = (blocks, block_size, kv_heads, self.k_blocks.shape[-1])
        k, v = (torch.zeros(shape, dtype=self.k_blocks.dtype, device=self.k_blocks.device) for _ in range(2))
        return PlainKv(self.kernels, k, v, self.window)


NewPages = Callable[[GroupedQueryAttention, int, int], PagedKv]  # for an attention's heads, so many blocks of that size


def move_slots(parts: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copies slots `sources` of each of `parts` [blocks, block_size, ...] to slots `targets`, both [tokens]."""
    for part in parts:
        size = part.shape[1]
        part[targets // size, targets % size] = part[sources // size, sources % size]
