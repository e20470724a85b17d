"""Where do the latents of multi-head latent attention lie?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.kernels.base import RaggedBatch
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.kv.store import move_slots


class LatentKv:
    """One vector a token for all heads, its latent and then its turned key: [blocks, block_size, 1, rank + rope]."""

    emulated = False

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks

    @classmethod
    def zeroed(cls, width: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> LatentKv:
        """A cache whose blocks are zero, in huge pages on a CPU."""
        shape = (num_blocks, block_size, 1, width)
        if device.type == "cpu":
            return cls(Arena().empty(shape, dtype))
        return cls(torch.zeros(shape, dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def of_sequence(self, batch: RaggedBatch, sequence: int, context: int) -> Tensor:
        """The latents of a sequence of the batch, which has `context` tokens: [context, rank + rope]."""
        size = self.blocks.shape[1]
        table = batch.block_table[sequence, : -(-context // size)].long()
        return self.blocks[table].flatten(0, 2)[:context]

    @property
    def parts(self) -> Sequence[Tensor]:
        return (self.blocks,)

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.parts

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self.parts, blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self.parts, blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        move_slots([self.blocks], sources, targets)
