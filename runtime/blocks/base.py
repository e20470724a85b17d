"""What must a part of a layer promise?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.linear import Linear


class LayerCache(Protocol):
    """What one layer keeps of the tokens before: blocks of K and V, latents, or a state for each seat."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, whether or not they are in use."""


class Mixer(Protocol):
    """Lets tokens see those before them: attention, or a recurrent state."""

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]; the tokens are added to `cache`."""

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> LayerCache:
        """An empty cache of this layer: `num_blocks` blocks of tokens, and `seats` sequences at once."""

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Its matrices by their part's name."""


class FeedForward(Protocol):
    """Works on each token by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Its matrices by their part's name."""


@dataclass(frozen=True)
class Block:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)); either part may be missing. Norms are fp32 [hidden]."""

    mixer_norm: Tensor | None
    mixer: Mixer | None
    ffn_norm: Tensor | None
    ffn: FeedForward | None

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """All matrices by their part's name."""
        if self.mixer is not None:
            yield from self.mixer.linears()
        if self.ffn is not None:
            yield from self.ffn.linears()
