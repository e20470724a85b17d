"""How far is a decoder whose KV cache is lossy from the unmodified one, on text that it reads as it would write it?

What a cache loses shows only in later steps: a prompt that is read in one pass has not been through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.plain import BLOCK_SIZE, single_sequence
from membound.runtime.quality.reading import Reading, Tally

MOST_KEPT_BYTES = 2**28
_BEFORE: WeakKeyDictionary[Decoder, tuple[object, list[Tensor]]] = WeakKeyDictionary()  # what each read last


class ReadersState(NamedTuple):
    """Caches, lengths and last logits of some readers."""

    kept: list[Tensor]
    lengths: list[int]
    logits: Tensor


class Readers:
    """Sequences of one decoder that are read step by step, all in one batch, in blocks and at seats of their own."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], most_tokens: int) -> None:
        """Reads each prompt in a pass of its own; a sequence will have up to `most_tokens` tokens."""
        self.decoder = decoder
        self.blocks = -(-most_tokens // BLOCK_SIZE)
        self.cache: KvCache = decoder.new_cache(self.blocks * len(prompts), BLOCK_SIZE, len(prompts))
        self.table = torch.arange(self.blocks * len(prompts), dtype=torch.int32).view(len(prompts), self.blocks)
        self.lengths = [len(prompt) for prompt in prompts]
        self.logits = torch.cat([self._prompt(i, prompt) for i, prompt in enumerate(prompts)])  # [sequences, vocab]

    def state(self) -> ReadersState:
        """What `put_back` needs to ask the same readers something else."""
        kept = [tensor.clone() for layer in self.cache for tensor in layer.kept]
        return ReadersState(kept, self.lengths, self.logits)

    def put_back(self, state: ReadersState) -> None:
        """They have read what they had when `state` was taken."""
        for tensor, kept in zip((t for layer in self.cache for t in layer.kept), state.kept, strict=True):
            tensor.copy_(kept)
        self.lengths, self.logits = state.lengths, state.logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Reads one more token of each sequence: logits [sequences, vocab]."""
        self.lengths = [length + 1 for length in self.lengths]
        positions = torch.tensor(self.lengths) - 1
        count = len(self.lengths)
        batch = RaggedBatch(
            positions=positions,
            slots=self.table[torch.arange(count), positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start=torch.arange(count + 1, dtype=torch.int32),
            context_len=torch.tensor(self.lengths, dtype=torch.int32),
            block_table=self.table,
            most_queries=1,
            seats=torch.arange(count),
        ).to(self.decoder.device)
        ids = torch.tensor(tokens, device=self.decoder.device)
        self.logits = self.decoder.forward(ids, batch, self.cache, torch.arange(count, device=ids.device))
        return self.logits

    def _prompt(self, sequence: int, prompt: Sequence[int]) -> Tensor:
        device = self.decoder.device
        alone = single_sequence(0, len(prompt), self.blocks, device)
        batch = RaggedBatch(
            positions=alone.positions,
            slots=alone.positions + sequence * self.blocks * BLOCK_SIZE,
            query_start=alone.query_start,
            context_len=alone.context_len,
            block_table=self.table[sequence : sequence + 1].to(device),
            seats=torch.tensor([sequence], device=device),
        )
        last = torch.tensor([len(prompt) - 1], device=device)
        return self.decoder.forward(torch.tensor(prompt, device=device), batch, self.cache, last)


def read_decoding(
    before: Decoder, after: Decoder, texts: Sequence[Sequence[int]], prompt: int | None = None
) -> Reading:
    """Reads texts of equal length with both decoders: `prompt` tokens at once, or half of them, the others one by one.

    What counts is the prediction of every token behind the prompt.
    """
    length = len(texts[0])
    assert all(len(text) == length for text in texts), "they are read in step"
    prompt = length // 2 if prompt is None else prompt
    tally = Tally()
    positions = range(prompt, length)
    for position, p, q in zip(
        positions, _known_before(before, texts, prompt), _predicted(after, texts, prompt), strict=True
    ):
        tally.add(p, q, torch.tensor([text[position] for text in texts]))
    return tally.reading()


def _predicted(decoder: Decoder, texts: Sequence[Sequence[int]], prompt: int) -> Iterator[Tensor]:
    """Log-probabilities [texts, vocab] of each token behind the prompts, token by token."""
    length = len(texts[0])
    readers = Readers(decoder, [text[:prompt] for text in texts], length)
    for position in range(prompt, length):
        yield torch.log_softmax(readers.logits, dim=-1)
        if position + 1 < length:
            readers.step([text[position] for text in texts])


def _known_before(decoder: Decoder, texts: Sequence[Sequence[int]], prompt: int) -> Iterable[Tensor]:
    """The same of the unmodified decoder, which every technique is compared with: read once, where memory has room."""
    asked = tuple(map(tuple, texts)), prompt
    known = _BEFORE.get(decoder)
    if known is not None and known[0] == asked:
        return known[1]
    predicted = _predicted(decoder, texts, prompt)
    if 4 * decoder.spec.vocab * len(texts) * (len(texts[0]) - prompt) > MOST_KEPT_BYTES:
        return predicted
    found = list(predicted)
    _BEFORE[decoder] = asked, found
    return found
