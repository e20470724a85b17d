"""Which blocks of a sequence hold the same tokens as blocks of other sequences?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """What a sequence's tokens are, as segments: segment j ends before token `ends[j]`.

    `ids[j]` stands for all tokens from the first to the end of segment j, not for the segment alone: two sequences
    with the same id hold the same tokens up to there. So identity costs a few numbers a request, whatever its length,
    and gives block hashes at any block size. Mooncake's hash ids are such ids, with segments of 512 tokens.
    A chain may cover the output too, so that the next turn finds the answer of this one.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the chain identifies."""
        return self.ends[-1] if self.ends else 0

    def block_hashes(self, block_size: int, tokens: int | None = None, first: int = 0) -> NDArray[np.uint64]:
        """The 64-bit hash of each full block of the first `tokens` tokens (of all that are identified), from the block
        of index `first` on.

        Equal hashes at the same index mean that the sequences are equal from their first token to that block's last.
        """
        full = min(self.tokens, self.tokens if tokens is None else tokens) // block_size
        index = np.arange(first, full, dtype=np.int64)
        last_token = (index + 1) * block_size - 1
        segment = np.searchsorted(np.asarray(self.ends, dtype=np.int64), last_token, side="right")
        return _mixed(np.asarray(self.ids, dtype=np.uint64)[segment], index.astype(np.uint64))


def _mixed(ids: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit hash of (id, index): the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), twice."""
    return _finalized(_finalized(ids + np.uint64(0x9E3779B97F4A7C15)) ^ index)


def mixed_hash(seed: int, id: int) -> int:
    """64 well-mixed bits of (seed, id)."""
    return int(_mixed(np.array([seed], dtype=np.uint64), np.array([id], dtype=np.uint64))[0])


def _finalized(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
