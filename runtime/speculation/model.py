"""How does a model write ahead: a smaller one, a quantized copy, or the first layers of the model itself?"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor

from membound.runtime.cuda_graphs import DecodeGraphs, DraftStep, decode_graphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.ragged import Part, ragged_batch
from membound.runtime.speculation.base import Chooser, Paths
from membound.simulator.scheduling.drafter import Room
from membound.simulator.scheduling.request import Draft, Sequence, Step


class ModelProposer:
    """Chains of up to `gamma` tokens that `decoder` writes, for all sequences at once.

    With `layers` it is the model itself, cut behind its first layers: `cache` is the model's own, in which these layers
    have K and V of all tokens that the model has computed, and keep those of its guesses at the places where the model
    will write the same again. Otherwise `cache` is the drafter's, in blocks with the numbers of the model's, and what
    it has not read yet, such as a prompt, it reads when it first drafts.
    """

    reads_hidden = False

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        block_size: int,
        gamma: int,
        choose: Chooser,
        layers: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.block_size = block_size
        self.computed_guesses = gamma
        self.choose = choose
        self.layers = layers
        self.graphs: DecodeGraphs | None = None
        self._read: dict[int, _Read] = {}
        self._drawn_from: dict[int, Tensor] = {}

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        lengths = {seq.id: min(self.computed_guesses, room.chain) for seq, room in zip(sequences, rooms, strict=True)}
        active = [sequence for sequence in sequences if lengths[sequence.id] > 0]
        written: dict[int, list[int]] = {sequence.id: [] for sequence in sequences}
        drawn: dict[int, list[Tensor]] = {sequence.id: [] for sequence in sequences}
        self._read = {seq.id: self._read[seq.id] for seq in sequences if seq.id in self._read}
        while active:
            chosen = self.choose(self._logits(active, written))
            for row, sequence in enumerate(active):
                written[sequence.id].append(chosen.tokens[row])
                if chosen.drawn_from is not None:
                    drawn[sequence.id].append(chosen.drawn_from[row])
            active = [sequence for sequence in active if len(written[sequence.id]) < lengths[sequence.id]]
        self._drawn_from = {id: torch.stack(rows) for id, rows in drawn.items() if rows}
        return [Draft(tuple(written[sequence.id])) for sequence in sequences]

    def capture(self, max_blocks: int, max_num_seqs: int) -> str | None:
        step = DraftStep(layers=self.layers)
        self.graphs, note = decode_graphs(self.decoder, self.cache, max_blocks, max_num_seqs, drafting=step)
        return note

    def drawn_from(self, sequence: int) -> Tensor | None:
        return self._drawn_from.get(sequence)

    def observe(self, step: Step, live: Container[int], normed: Tensor | None, paths: Paths) -> None:
        """Nothing of what the model computes is needed."""

    def _logits(self, sequences: list[Sequence], written: dict[int, list[int]]) -> Tensor:
        """Logits [sequences, vocab] behind the last token of each, of those written ahead if there are any."""
        token_ids: list[int] = []
        parts: list[Part] = []
        for sequence in sequences:
            assert sequence.token_ids is not None, "the runtime needs the tokens"
            guesses = written[sequence.id]
            end = sequence.tokens + len(guesses)
            start = end - 1 if guesses else self._first_unread(sequence)
            token_ids += [*sequence.token_ids[start:], *guesses[max(start - sequence.tokens, 0) :]]
            parts.append(Part(start, end - start, sequence.blocks))
            self._read[sequence.id] = _Read(end, sequence.preemptions)
        ids, batch = torch.tensor(token_ids), ragged_batch(parts, self.block_size)
        rows, device = (batch.query_start[1:] - 1).long(), self.decoder.device
        if self.graphs is not None and self.graphs.takes(batch):
            return self.graphs.run(ids, batch, rows)[1]
        normed = self.decoder.hidden(ids.to(device), batch.to(device), self.cache, self.layers).normed
        return self.decoder.logits(normed[rows.to(device)])

    def _first_unread(self, sequence: Sequence) -> int:
        """The first token of which the drafter has no K and V; a guess that was accepted is one of those it has."""
        if self.layers is not None:
            return sequence.computed
        read = self._read.get(sequence.id)
        if read is None or read.preemptions != sequence.preemptions:
            return 0
        return min(read.tokens, sequence.computed)


class _Read(NamedTuple):
    """How many tokens of a sequence the drafter has read, since it was preempted so often."""

    tokens: int
    preemptions: int
