"""How many tokens do prompts and outputs have?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from membound.roofline.scenario.workload import (
    FixedLength,
    HistogramLength,
    Length,
    LognormalLength,
    QuantileLength,
    TraceLength,
    UniformLength,
)
from membound.simulator.scheduling.workload.streams import CHUNK
from membound.simulator.scheduling.workload.traces import read_trace

Counts = NDArray[np.int64]


class LengthSampler:
    """Draws from one length distribution; a trace is read once, when the sampler is made."""

    def __init__(self, length: Length) -> None:
        self.length = length
        if isinstance(length, TraceLength):
            self._shares, self._tokens = _trace_steps(length)

    def draw(self, count: int, rng: np.random.Generator) -> Counts:
        """`count` independent token counts."""
        match self.length:
            case FixedLength():
                return np.full(count, self.length.tokens)
            case UniformLength():
                return rng.integers(self.length.low, self.length.high + 1, count)
            case LognormalLength():
                return self.from_normal(rng.standard_normal(count))
            case _:
                return self._quantile(rng.random(count))

    def from_normal(self, z: NDArray[np.float64]) -> Counts:
        """The token counts that lie where `z` lies in the standard normal distribution."""
        if isinstance(self.length, LognormalLength):
            tokens = np.exp(np.log(self.length.median) + self.length.sigma * z)
            return np.clip(np.rint(tokens), self.length.low, self.length.high).astype(np.int64)
        # half of the import time of this package, and only correlated lengths need it
        from scipy.special import ndtr

        return self._quantile(ndtr(z))

    def _quantile(self, share: NDArray[np.float64]) -> Counts:
        """The token counts that a `share` (0 to 1) of the distribution does not exceed."""
        match self.length:
            case FixedLength():
                return np.full(len(share), self.length.tokens)
            case UniformLength(low=low, high=high):
                return np.minimum(low + (share * (high - low + 1)).astype(np.int64), high)
            case QuantileLength(shares=shares, tokens=tokens):
                return np.rint(np.interp(share, shares, tokens)).astype(np.int64)
            case HistogramLength(edges=edges, counts=counts):
                reached = np.concatenate(([0.0], np.cumsum(counts) / np.sum(counts)))
                # a bin that nobody is in has no width in shares; interp never stops inside it
                return np.minimum(np.interp(share, reached, edges).astype(np.int64), edges[-1] - 1)
            case TraceLength():
                index = np.minimum(np.searchsorted(self._shares, share, side="right"), len(self._tokens) - 1)
                return self._tokens[index]
            case LognormalLength():
                raise AssertionError("a lognormal length is drawn from the normal distribution")


def _trace_steps(length: TraceLength) -> tuple[NDArray[np.float64], Counts]:
    """The distinct lengths of a trace's column in order, and the share of rows up to each; memory follows those."""
    column = "prompt_tokens" if length.column == "input" else "output_tokens"
    rows = Counter(getattr(row, column) for row in read_trace(length))
    tokens = np.array(sorted(rows), dtype=np.int64)
    reached = np.cumsum([rows[value] for value in tokens.tolist()])
    return reached / reached[-1], tokens


def pair_chunks(
    prompt: Length, output: Length, rank_correlation: float, rng: np.random.Generator
) -> Iterator[tuple[Counts, Counts]]:
    """Endless chunks of (new prompt tokens, output tokens) with a Spearman correlation of `rank_correlation`.

    The ranks are joined by a Gaussian copula, whose Pearson correlation is 2 sin(pi rho / 6) (Kruskal, JASA 1958).
    Lengths that many requests share (a cap, few distinct values) tie ranks and weaken it.
    """
    prompts, outputs = LengthSampler(prompt), LengthSampler(output)
    if not rank_correlation:
        while True:
            yield prompts.draw(CHUNK, rng), outputs.draw(CHUNK, rng)
    pearson = 2 * np.sin(np.pi * rank_correlation / 6)
    while True:
        first, second = rng.standard_normal((2, CHUNK))
        joined = pearson * first + np.sqrt(1 - pearson**2) * second
        yield prompts.from_normal(first), outputs.from_normal(joined)
