"""What does a technique cost in quality, and who says so?

A small model loses more than a large one, so that figures of SmolLM2-135M are upper bounds for most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# From so much on a price in quality is heavy: who takes it gets another model, whatever it gains. The next smaller one
# of a family costs as much (Llama-2-7B for 13B: perplexity 5.47 for 4.88 on WikiText-2, from memory).
HEAVY = 0.1
LONG_CONTEXT = "measured: data/measurements/README.md, long-context-cpu"


@dataclass(frozen=True)
class Quality:
    """What a technique costs in quality; `rank` 0 is lossless, and higher costs more.

    `brief` is the figure of the note in a few words, and `loss` how much worse it is relatively: perplexity that is so
    much higher, points or equal tokens that are so much fewer.
    """

    rank: int
    note: str
    source: str
    brief: str = "lossless"
    loss: float = 0.0

    @property
    def heavy(self) -> bool:
        return self.loss >= HEAVY


LOSSLESS = Quality(0, "lossless: the same tokens", "by construction; `membound measure` checks it")


def perplexity(rank: int, before: float, after: float, note: str, source: str) -> Quality:
    """The price of a technique that raises perplexity from `before` to `after`."""
    loss = after / before - 1.0
    times = f"perplexity x{after / before:.0f}" if loss > 9.0 else f"perplexity +{loss:.{0 if loss >= 0.1 else 1}%}"
    return Quality(rank, f"perplexity {note}", source, times, loss)


def points(rank: int, before: float, after: float, note: str, source: str) -> Quality:
    """The price of a technique that lowers a benchmark from `before` to `after` points."""
    loss = 1.0 - after / before
    return Quality(rank, note, source, f"points -{loss:.1%}", loss)


def of_width(bits: float, known: Mapping[int, Quality]) -> Quality:
    """The price of a format of so many bits: that of the next known width."""
    return known[next((width for width in sorted(known) if bits <= width + 0.5), max(known))]
