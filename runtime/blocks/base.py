"""What must a part of a layer promise, and how do parts make a layer?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.runtime.blocks.norms import Norm
from membound.runtime.linear import Linear


class LayerCache(Protocol):
    """What one layer keeps of the tokens before: blocks of K and V, latents, or a state for each seat."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, whether or not they are in use."""

    @property
    def kept(self) -> Sequence[Tensor]:
        """All that it knows of the tokens that it was given."""


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


class ShiftedFeedForward(ABC):
    """A network that also sees its input of the token before, which the layer's cache keeps (RWKV).

    A class and no protocol, because every step asks each layer whether it has one.
    """

    @abstractmethod
    def shifted(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""

    @abstractmethod
    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Its matrices by their part's name."""


class RoutedFeedForward(ABC):
    """A network that sends each token of a batch elsewhere, and a row that is padding nowhere."""

    @abstractmethod
    def routed(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""

    @abstractmethod
    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Its matrices by their part's name."""


class Stream:
    """The hidden states of a step's tokens between two parts: a sum, and what the last part has yet to add to it."""

    def __init__(self, residual: Tensor) -> None:
        self.residual = residual  # [tokens, hidden]
        self.added: Tensor | None = None

    def normed(self, norm: Norm | None) -> Tensor:
        """The sum, normed; the sum itself without a norm."""
        added, self.added = self.added, None
        if norm is None:
            if added is not None:
                self.residual += added
            return self.residual
        return norm(self.residual) if added is None else norm.add(added, self.residual)


@dataclass(frozen=True)
class Block:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)); either part may be missing, and so may a norm.

    A norm after a part applies to what it adds. In a `parallel` layer both parts read the same x, and the network the
    mixer's norm if it has none of its own. What a part adds is multiplied by `scale`.
    """

    kernels: Kernels
    mixer: Mixer | None
    ffn: FeedForward | ShiftedFeedForward | RoutedFeedForward | None
    mixer_norm: Norm | None = None
    mixer_post_norm: Norm | None = None
    ffn_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    parallel: bool = False
    scale: float = 1.0

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """All matrices by their part's name."""
        if self.mixer is not None:
            yield from self.mixer.linears()
        if self.ffn is not None:
            yield from self.ffn.linears()

    def __call__(self, stream: Stream, batch: RaggedBatch, cache: LayerCache | None) -> None:
        """Takes the stream through this layer; `cache` is that of the mixer."""
        if self.parallel:
            x = stream.normed(self.mixer_norm)
            y = x if self.ffn_norm is None else self.ffn_norm(stream.residual)
            stream.added = self.kernels.add(self._mix(x, batch, cache), self._feed(y, batch, cache))
            return
        if self.mixer is not None:
            mixed = self._mix(stream.normed(self.mixer_norm), batch, cache)
            stream.added = mixed if self.mixer_post_norm is None else self.mixer_post_norm(mixed)
        if self.ffn is not None:
            fed = self._feed(stream.normed(self.ffn_norm), batch, cache)
            stream.added = fed if self.ffn_post_norm is None else self.ffn_post_norm(fed)

    def _mix(self, x: Tensor, batch: RaggedBatch, cache: LayerCache | None) -> Tensor:
        assert self.mixer is not None and cache is not None, "a layer that mixes has a cache"
        return self._scaled(self.mixer(x, batch, cache))

    def _feed(self, x: Tensor, batch: RaggedBatch, cache: LayerCache | None) -> Tensor:
        if isinstance(self.ffn, ShiftedFeedForward):
            assert cache is not None, "a network that sees the token before stands beside a mixer"
            return self._scaled(self.ffn.shifted(x, batch, cache))
        if isinstance(self.ffn, RoutedFeedForward):
            return self._scaled(self.ffn.routed(x, batch))
        assert self.ffn is not None, "the caller has checked it"
        return self._scaled(self.ffn(x))

    def _scaled(self, added: Tensor) -> Tensor:
        return added if self.scale == 1 else self.kernels.scaled(added, self.scale)
