"""How is a planned step computed with tensors?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.roofline.errors import MemboundError
from membound.runtime.cuda_graphs import DecodeGraphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.kv.block_moves import BlockMover
from membound.runtime.ragged import MOST_IN_TREE, Part, guessed_batch, ragged_batch, slots_of
from membound.runtime.rollback import Rollback
from membound.runtime.sampling import Guesses, LogitsError, Sampler, Verified
from membound.runtime.speculation.base import Proposer
from membound.simulator.scheduling.loop import Clock
from membound.simulator.scheduling.request import Outcome, Sequence, Step, Work

if TYPE_CHECKING:
    from membound.runtime.parallel.leader import DividedDecoder


class TorchExecutor:
    """Runs steps on a decoder over a pool of KV blocks, and takes their time from the clock.

    Steps that `graphs` has captured are replayed. A `proposer` that drafts from what the model computes is told of it.
    A `mover` brings blocks where the scheduler's tables want them, before the step that reads them.
    """

    def __init__(
        self,
        decoder: Decoder | DividedDecoder,
        kv: KvCache,
        block_size: int,
        sampler: Sampler,
        clock: Clock,
        graphs: DecodeGraphs | None = None,
        proposer: Proposer | None = None,
        mover: BlockMover | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.block_size = block_size
        self.sampler = sampler
        self.clock = clock
        self.graphs = graphs
        self.proposer = proposer
        self.mover = mover
        self.seats = Seats()
        self.rollback = Rollback(kv)
        self.steps = 0

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        start_s = self.clock.now_s()
        self.steps += 1
        if self.mover is not None:
            self.mover()
        self.seats.update(step, sequences)
        self.rollback.forget(step, sequences)
        normed, logits = self._computed(step.work, sequences)
        emitting = [work for work in step.work if work.emits]
        verified = self._verified(emitting, logits)
        paths = {work.sequence: found.path for work, found in zip(emitting, verified, strict=True)}
        self._keep_paths(emitting, paths, sequences)
        self.rollback.settle(step, paths, self.seats.of)
        if self.proposer is not None:
            self.proposer.observe(step, sequences, normed, paths)
        emitted = {work.sequence: found.tokens for work, found in zip(emitting, verified, strict=True)}
        return Outcome(self.clock.now_s() - start_s, emitted)

    def _computed(self, listed: tuple[Work, ...], sequences: dict[int, Sequence]) -> tuple[Tensor | None, Tensor]:
        """The normed hidden states [tokens, hidden] where the proposer reads them, and the logits [rows, vocab]."""
        in_trees = any(work.parents is not None for work in listed)
        if in_trees and max(work.tokens for work in listed) > MOST_IN_TREE:
            # A long prompt has no bits to say what its tokens see: it is computed apart.
            decoding = tuple(work for work in listed if work.tokens <= MOST_IN_TREE)
            rest = tuple(work for work in listed if work.tokens > MOST_IN_TREE)
            return self._apart(listed, (decoding, rest), sequences)
        token_ids, batch, rows = self._inputs(listed, sequences)
        reads_hidden = self.proposer is not None and self.proposer.reads_hidden
        if self.graphs is not None and self.graphs.takes(batch):
            normed, logits = self.graphs.run(token_ids, batch, rows)
            # The next replay writes there, and a proposer may look back further.
            return normed.clone() if reads_hidden else None, logits
        if not isinstance(self.decoder, Decoder):
            assert not reads_hidden, "hidden states are those of one process"
            return None, self.decoder.forward(token_ids, batch, self.kv, rows)
        device = self.decoder.device
        if not reads_hidden:
            return None, self.decoder.forward(token_ids.to(device), batch.to(device), self.kv, rows.to(device))
        normed = self.decoder.hidden(token_ids.to(device), batch.to(device), self.kv).normed
        return normed, self.decoder.logits(normed[rows.to(device)])

    def _apart(
        self, listed: tuple[Work, ...], groups: tuple[tuple[Work, ...], ...], sequences: dict[int, Sequence]
    ) -> tuple[Tensor | None, Tensor]:
        """The same, computed group by group and put into the order of `listed`."""
        states: dict[int, Tensor] = {}
        logits: dict[int, Tensor] = {}
        for group in groups:
            normed, rows = self._computed(group, sequences)
            for work, part in zip(group, rows.split([work.logits_rows for work in group]), strict=True):
                logits[work.sequence] = part
            if normed is not None:
                for work, part in zip(group, normed.split([work.tokens for work in group]), strict=True):
                    states[work.sequence] = part
        all_states = torch.cat([states[work.sequence] for work in listed]) if states else None
        return all_states, torch.cat([logits[work.sequence] for work in listed])

    def _inputs(self, listed: tuple[Work, ...], sequences: dict[int, Sequence]) -> tuple[Tensor, RaggedBatch, Tensor]:
        """Token ids [tokens], the ragged batch, and the rows [rows] whose logits are needed, on the host."""
        tokens: list[int] = []
        parts: list[Part] = []
        rows: list[int] = []
        for work in listed:
            ids = sequences[work.sequence].token_ids
            assert ids is not None, "the runtime needs the tokens"
            start = self.rollback.start(work)
            tokens += ids[start : work.context]
            tokens += work.drafts
            blocks, seat = sequences[work.sequence].blocks, self.seats.of[work.sequence]
            parts.append(Part(start, work.context - start, blocks, seat, len(work.drafts), work.parents))
            rows += range(len(tokens) - work.logits_rows, len(tokens))
        batch = (guessed_batch if self.rollback.needed else ragged_batch)(parts, self.block_size)
        return torch.tensor(tokens), batch, torch.tensor(rows, dtype=torch.int64)

    def _verified(self, emitting: list[Work], logits: Tensor) -> list[Verified]:
        """What each sequence emits; raises MemboundError that names the step and the request without numbers."""
        try:
            return self.sampler.verify(logits, [self._guesses(work) for work in emitting])
        except LogitsError as error:
            of_rows = [work.sequence for work in emitting for _ in range(work.logits_rows)]
            raise MemboundError(
                f"step {self.steps} gave logits of request {of_rows[error.row]} that are NaN or infinite: the weights "
                f"of {self.decoder.spec.name} or a format of this scenario overflow; take other weights or formats"
            ) from None

    def _guesses(self, work: Work) -> Guesses:
        drawn_from = self.proposer.drawn_from(work.sequence) if self.proposer and work.drafts else None
        return Guesses(work.drafts, work.parents, drawn_from)

    def _keep_paths(
        self, emitting: list[Work], paths: dict[int, tuple[int, ...]], sequences: dict[int, Sequence]
    ) -> None:
        """Moves K and V of the guesses that were accepted behind those of the tokens before them."""
        sources: list[int] = []
        targets: list[int] = []
        for work in emitting:
            first = work.context - len(work.drafts)
            moved = [(first + guess, first + i) for i, guess in enumerate(paths[work.sequence]) if guess != i]
            blocks = sequences[work.sequence].blocks
            sources += slots_of(blocks, [source for source, _ in moved], self.block_size)
            targets += slots_of(blocks, [target for _, target in moved], self.block_size)
        if sources:
            device = self.decoder.device
            lists = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
            for layer in self.kv:
                layer.move_tokens(*lists)  # type: ignore[attr-defined]


class Seats:
    """Which place of the layers' constant-size states each sequence has, from its first step until it leaves."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self._free: list[int] = []

    def update(self, step: Step, sequences: dict[int, Sequence]) -> None:
        """Frees the seats of those that ended or lost their blocks, then seats those of the step that have none."""
        gone = [id for id in self.of if id not in sequences or id in step.preempted]
        self._free += [self.of.pop(id) for id in gone]
        for work in step.work:
            if work.sequence not in self.of:
                self.of[work.sequence] = self._free.pop() if self._free else len(self.of)
