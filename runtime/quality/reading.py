"""How well does a decoder predict a text, and how far are its predictions from those of the unmodified one?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.decoder import KvCache
from membound.runtime.plain import BLOCK_SIZE, single_sequence

ROWS = 128  # tokens that are read in one step, and whose logits are held at once


class Reader(Protocol):
    """What reading needs of a decoder, whole or divided."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, num_blocks: int, block_size: int, seats: int = 1) -> KvCache: ...

    def forward(self, token_ids: Tensor, batch: RaggedBatch, cache: KvCache, logits_rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Reading:
    """What reading texts token by token, teacher-forced, shows of a modified decoder beside the unmodified one.

    KL divergence (of the unmodified one's next-token distributions from the modified one's) and agreement are means
    over all `tokens`; perplexities leave out each text's first token, which nothing predicts.
    """

    kl_nats: float
    top1_agreement: float
    perplexity_before: float
    perplexity: float
    tokens: int


class Tally:
    """Adds up what two decoders predict, piece by piece."""

    def __init__(self) -> None:
        self.kl = self.agreed = self.nats_before = self.nats = 0.0
        self.tokens = self.predicted = 0

    def add(self, before: Tensor, after: Tensor, targets: Tensor) -> None:
        """Log-probabilities [rows, vocab] of both, and the tokens [at most rows] that came behind the first rows."""
        self.kl += float((before.exp() * (before - after)).sum(dtype=torch.float64))
        self.agreed += float((before.argmax(-1) == after.argmax(-1)).sum())
        targets = targets.to(before.device)
        self.nats_before -= _sum_at(before, targets)
        self.nats -= _sum_at(after, targets)
        self.tokens += before.shape[0]
        self.predicted += len(targets)

    def reading(self) -> Reading:
        perplexities = _perplexity(self.nats_before, self.predicted), _perplexity(self.nats, self.predicted)
        return Reading(self.kl / self.tokens, self.agreed / self.tokens, *perplexities, self.tokens)


def read(before: Reader, after: Reader, texts: Sequence[Sequence[int]]) -> Reading:
    """Reads every text with both decoders."""
    tally = Tally()
    for text in texts:
        targets = torch.tensor(text[1:])
        rows = zip(_log_probabilities(before, text), _log_probabilities(after, text), strict=True)
        for start, (p, q) in zip(range(0, len(text), ROWS), rows, strict=True):
            tally.add(p, q, targets[start : start + ROWS])
    return tally.reading()


def perplexity(decoder: Reader, texts: Sequence[Sequence[int]]) -> float:
    """e to the mean negative log-likelihood of every text's tokens but its first."""
    nats, predicted = 0.0, 0
    for text in texts:
        targets = torch.tensor(text[1:])
        for start, p in zip(range(0, len(text), ROWS), _log_probabilities(decoder, text), strict=True):
            wanted = targets[start : start + ROWS].to(p.device)
            nats -= _sum_at(p, wanted)
            predicted += len(wanted)
    return _perplexity(nats, predicted)


def _log_probabilities(decoder: Reader, token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Log-probabilities [up to ROWS, vocab] in fp32 at all positions of one text, piece by piece."""
    blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = decoder.new_cache(blocks, BLOCK_SIZE)
    for start in range(0, len(token_ids), ROWS):
        piece = torch.tensor(token_ids[start : start + ROWS], device=decoder.device)
        batch = single_sequence(start, start + len(piece), blocks, decoder.device)
        rows = torch.arange(len(piece), device=decoder.device)
        yield torch.log_softmax(decoder.forward(piece, batch, cache, rows), dim=-1)


def _sum_at(log_probabilities: Tensor, targets: Tensor) -> float:
    rows = log_probabilities[: len(targets)]
    return float(rows.gather(1, targets[:, None]).sum(dtype=torch.float64))


def _perplexity(nats: float, predicted: int) -> float:
    """Infinite where the model gives the text no chance, and NaN where its logits are no numbers."""
    mean = nats / predicted if predicted else math.nan
    return math.exp(mean) if mean < 700 else mean * math.inf
