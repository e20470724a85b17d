"""How long does the attention of a step's prompts take, answered a million times?

It is tabulated for equal prompts: so many, of so many tokens, behind so many cached ones. Prompts of a step that are
not equal count as equal ones of as many tokens, behind as many cached ones as give their query-key pairs. Layers with a
window have tables of their own, since their pairs are others.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import sqrt
from typing import Any

import numpy as np

from membound.roofline.shape import AttentionPart, StepShape
from membound.roofline.within import Within
from membound.simulator.tables import Split, place

PROMPTS = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256]
# Tokens of a prompt, on both sides of each tile's edge.
_TILES = range(64, 2049, 64)
PROMPT_TOKENS = sorted({1, 16, 34, 48, *_TILES, *(edge + 1 for edge in _TILES)})
PROMPT_TOKENS += [2560, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536, 131072, 1048576]
CACHED_TOKENS = [0, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 8388608]
_KEPT_PROMPTS = 1 << 14

Grid = list[list[list[float]]]


class PromptTimes:
    """Seconds of the device that a step's prompts add to those of its tokens and rows of logits, which `split` gives
    beside those of waiting for the host."""

    def __init__(self, split: Split, windows: tuple[int, ...]) -> None:
        self._split = split
        self._windows = windows
        self._cached = [CACHED_TOKENS, *map(cached_within, windows)]
        self.seconds = lru_cache(_KEPT_PROMPTS)(self._seconds)  # most steps have one prompt, of a length seen before

    @cached_property
    def _whole(self) -> Grid:
        return self._grid(0)

    @cached_property
    def _parts(self) -> list[tuple[int, list[int], Grid]]:
        """Of each window the cached tokens of its table, and the table."""
        return [(window, self._cached[part], self._grid(part)) for part, window in enumerate(self._windows, 1)]

    def _seconds(self, tokens: float, prompts: float, attended: float, *within: float) -> float:
        """Seconds of so many prompts with so many tokens and pairs, and pairs of layers `within` each window."""
        mean = tokens / prompts
        (i, x), (j, y) = place(PROMPTS, prompts), place(PROMPT_TOKENS, mean)
        seconds = _between(self._whole, i, x, j, y, CACHED_TOKENS, max(0.0, attended / tokens - (mean + 1) / 2))
        if within:
            for (window, axis, grid), pairs in zip(self._parts, within, strict=True):
                seconds += _between(grid, i, x, j, y, axis, cached_behind(window, pairs / prompts, mean))
        return seconds

    def _grid(self, part: int) -> Grid:
        """What some equal prompts of so many tokens behind so many cached ones add: [prompts, tokens, cached].

        Of the first part the whole, where layers with a window see no cached ones; of the others what these add.
        """
        axes = np.meshgrid(PROMPTS, PROMPT_TOKENS, self._cached[part], indexing="ij")
        count, tokens, cached = (axis.ravel().astype(np.float64) for axis in axes)
        behind = [np.zeros_like(cached) for _ in self._cached]
        behind[part] = cached
        seconds = self._split(self._shape(count, tokens, behind))[0].reshape(axes[0].shape)
        if part:
            return (seconds - seconds[:, :, :1]).tolist()
        count, tokens = (axis[:, :, 0].ravel().astype(np.float64) for axis in axes[:2])
        alone, _ = self._split(StepShape(count * tokens, 0.0 * count, 0.0, 0.0, count, count * tokens))
        return (seconds - alone.reshape(len(PROMPTS), -1, 1)).tolist()

    def _shape(self, count: Any, tokens: Any, behind: list[Any]) -> StepShape:
        """Prompts behind so many cached tokens as all layers see them, and as those with each window do."""
        whole, *seen = (
            AttentionPart(count * tokens, count, count * (tokens + each), count * tokens * (each + (tokens + 1) / 2))
            for each in behind
        )
        parts = (part.windowed(window) for window, part in zip(self._windows, seen, strict=True))
        within = (
            Within(window, 0.0, part.kv_tokens, part.attended)
            for window, part in zip(self._windows, parts, strict=True)
        )
        return StepShape(*whole, count, *whole, within=tuple(within))


def cached_within(window: int) -> list[int]:
    """Cached tokens at which what a layer with a window sees of prompts is tabulated: it sees no more than those."""
    shares = {round(window * share) for share in (0.125, 0.25, 0.5, 0.75, 1.0)}
    return sorted({0, *(cached for cached in CACHED_TOKENS if cached < window), *shares} | {2 * window})


def cached_behind(window: int, pairs: float, tokens: float) -> float:
    """Cached tokens behind which a prompt of so many tokens has so many pairs in a layer with a window."""
    missing = tokens * window - pairs  # of those that it has behind a whole window
    if missing <= 0.0:
        return float(window)
    short = pairs / tokens - (tokens + 1.0) / 2.0
    if short <= window - tokens:
        return max(0.0, short)
    return max(0.0, window - (1.0 + sqrt(1.0 + 8.0 * missing)) / 2.0)


def _between(grid: Grid, i: int, x: float, j: int, y: float, axis: list[int], cached: float) -> float:
    """Of a grid the seconds so far beyond the entry of i numbers of prompts and j of tokens, at cached tokens of its
    axis."""
    k, z = place(axis, cached)
    near = grid[i]
    first = near[j][k] * (1 - z) + near[j][k + 1] * z
    second = near[j + 1][k] * (1 - z) + near[j + 1][k + 1] * z
    at_near = first * (1 - y) + second * y
    if not x:
        return at_near
    far = grid[i + 1]
    first = far[j][k] * (1 - z) + far[j][k + 1] * z
    second = far[j + 1][k] * (1 - z) + far[j + 1][k + 1] * z
    return at_near * (1 - x) + (first * (1 - y) + second * y) * x
