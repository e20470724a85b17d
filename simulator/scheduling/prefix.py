"""Which blocks of a sequence hold the same tokens as blocks of other sequences?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# A block by the id of its last token's segment, and by its index in the sequence.
BlockName = tuple[int, int]


class Span(NamedTuple):
    """Blocks `first` to `end - 1` of a sequence, all of whose last tokens are of the segment `id`."""

    id: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """What a sequence's tokens are, as segments: segment j ends before token `ends[j]`.

    `ids[j]` stands for all tokens from the first to the end of segment j, not for the segment alone: two sequences
    with the same id hold the same tokens up to there. So identity costs a few numbers a request, whatever its length,
    and names blocks at any block size. Mooncake's hash ids are such ids, with segments of 512 tokens.
    A chain may cover the output too, so that the next turn finds the answer of this one.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the chain identifies."""
        return self.ends[-1] if self.ends else 0

    def spans(self, block_size: int, tokens: int | None = None, first: int = 0) -> list[Span]:
        """The full blocks of the first `tokens` tokens (of all that are identified), from that of index `first` on.

        A block belongs to the segment of its last token. Blocks of the same id and index hold the same tokens, from the
        sequence's first one on.
        """
        full = min(self.tokens, self.tokens if tokens is None else tokens) // block_size
        spans, begin = [], first
        for id, end in zip(self.ids, self.ends, strict=True):
            until = min(end // block_size, full)
            if until > begin:
                spans.append(Span(id, begin, until))
                begin = until
                if until == full:
                    break
        return spans


def leading(spans: list[Span], blocks: int) -> list[Span]:
    """The first so many blocks of spans that follow each other from block 0 on."""
    return between(spans, 0, blocks)


def between(spans: list[Span], first: int, end: int) -> list[Span]:
    """Blocks `first` to `end - 1` of spans that follow each other."""
    return [Span(id, max(a, first), min(b, end)) for id, a, b in spans if a < end and b > first]


def blocks_of(spans: Iterable[Span]) -> list[BlockName]:
    """Each block of some spans."""
    return [(id, index) for id, first, end in spans for index in range(first, end)]


def count_of(spans: Iterable[Span]) -> int:
    """How many blocks some spans have."""
    return sum([end - first for _, first, end in spans])


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
