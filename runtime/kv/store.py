"""Where do K and V of a layer's tokens lie, and how is attention computed over them?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.rope import RopeTables


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


class PlainKv:
    """K and V as the kernels keep them, [blocks, block_size, kv_heads, head_dim] each."""

    emulated = False

    def __init__(self, kernels: Kernels, k_blocks: Tensor, v_blocks: Tensor, window: int | None = None) -> None:
        self.kernels = kernels
        self.k_blocks = k_blocks
        self.v_blocks = v_blocks
        self.window = window

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
    def nbytes(self) -> int:
        return self.k_blocks.nbytes + self.v_blocks.nbytes

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        q = self.kernels.rope_and_store(qkv, rope.cos, rope.sin, batch, self.k_blocks, self.v_blocks)
        k, v = self.k_blocks, self.v_blocks
        return self.kernels.attention(q, k, v, batch, scale, window=self.window, softcap=softcap)

    @property
    def parts(self) -> Sequence[Tensor]:
        return self.k_blocks, self.v_blocks

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self.parts, blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self.parts, blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        move_slots([self.k_blocks, self.v_blocks], sources, targets)


def move_slots(parts: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copies slots `sources` of each of `parts` [blocks, block_size, ...] to slots `targets`, both [tokens]."""
    for part in parts:
        size = part.shape[1]
        part[targets // size, targets % size] = part[sources // size, sources % size]
