"""How much of the attention of prompts do kernels compute, given that they take queries in whole tiles?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from membound.roofline.within import MOST_DECODE_TOKENS, pairs_within

if TYPE_CHECKING:
    from membound.roofline.shape import Count

# Queries that a block of the matrix unit works on.
QUERY_TILE = 128


class Tiles(NamedTuple):
    """Sums over the prompts of a step, each in its own tiles, in layers that look `window` tokens back, or at all.

    `rows` are queries, with those that fill a prompt's last tile up; `pairs` those of all rows with keys; `hidden` as
    many as the causal mask hides of them: half a prompt's new tokens for each row, or what a query sees where that is
    less.
    """

    window: int | None
    rows: Count
    pairs: Count
    hidden: Count

    @classmethod
    def of_equal(cls, window: int | None, tokens: Count, sequences: Count, attended: Count) -> Tiles:
        """Of equal prompts of so many tokens and query-key pairs together."""
        each = tokens / np.maximum(sequences, 1e-9)
        padded = np.ceil(each / QUERY_TILE) * QUERY_TILE
        keys, rows = attended / np.maximum(tokens, 1e-9), padded * sequences
        return cls(window, rows, (keys + (padded - each) / 2.0) * rows, np.minimum(each / 2.0, keys) * rows)

    def __add__(self, other: Tiles) -> Tiles:  # type: ignore[override]
        """Of the prompts of both."""
        return Tiles(self.window, *(mine + others for mine, others in zip(self[1:], other[1:], strict=True)))

    def mapped(self, change: Callable[[Any], Any]) -> Tiles:
        """With each of the sums changed."""
        return Tiles(self.window, *map(change, self[1:]))

    def as_equal(self, tokens: float, prompts: float) -> Any:
        """Query-key pairs of equal prompts, so many with so many tokens together, whose tiles have as many pairs."""
        each = tokens / prompts
        padded = -(-each // QUERY_TILE) * QUERY_TILE
        return tokens * (self.pairs / (padded * prompts) - (padded - each) / 2.0)


def tiles_of(parts: Sequence[tuple[int, int, int]], windows: tuple[int, ...]) -> tuple[Tiles, ...]:
    """What kernels compute of a step's prompts, given as for `shape_sums`: of layers that see all tokens, and of those
    with each window. Empty where fewer than two bring prompts, whose tiles follow from the sums of the step."""
    count = rows = 0
    pairs = hidden = 0.0
    for cached, new, _ in parts:
        if new > MOST_DECODE_TOKENS or (cached == 0 and new > 1):
            padded = -(-new // QUERY_TILE) * QUERY_TILE
            count += 1
            rows += padded
            pairs += (cached + (padded + 1) / 2) * padded
            hidden += new * padded / 2
    if count < 2:
        return ()
    whole = Tiles(None, rows, pairs, hidden)
    return (whole, *[_within(parts, window) for window in windows]) if windows else (whole,)


def _within(parts: Sequence[tuple[int, int, int]], window: int) -> Tiles:
    rows = pairs = hidden = 0.0
    for cached, new, _ in parts:
        if new <= MOST_DECODE_TOKENS and (cached or new == 1):
            continue
        padded = -(-new // QUERY_TILE) * QUERY_TILE
        keys = cached + (new + 1) / 2
        if cached + new > window:
            keys = pairs_within(window, cached, new, min(max(window - cached, 0), new)) / new
        rows += padded
        pairs += (keys + (padded - new) / 2) * padded
        hidden += min(new / 2, keys) * padded
    return Tiles(window, rows, pairs, hidden)
