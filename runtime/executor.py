"""How is a planned step computed with tensors?"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.cuda_graphs import DecodeGraphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.sampling import Sampler
from membound.simulator.scheduling.loop import Clock
from membound.simulator.scheduling.request import Outcome, Sequence, Step


class TorchExecutor:
    """Runs steps on a decoder over a pool of KV blocks, and takes their time from the clock.

    Steps that `graphs` has captured are replayed.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KvCache,
        block_size: int,
        sampler: Sampler,
        clock: Clock,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.block_size = block_size
        self.sampler = sampler
        self.clock = clock
        self.graphs = graphs
        self.seats = Seats()

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        start_s = self.clock.now_s()
        self.seats.update(step, sequences)
        token_ids, batch, logits_rows = self._inputs(step, sequences)
        if self.graphs is not None and self.graphs.takes(batch):
            logits = self.graphs.run(token_ids, batch, logits_rows)  # [rows, vocab]
        else:
            device = self.decoder.device
            logits = self.decoder.forward(token_ids.to(device), batch.to(device), self.kv, logits_rows.to(device))
        emitting = [work for work in step.work if work.emits]
        drafts = [work.drafts for work in emitting]
        emitted = self.sampler.verify(logits, [work.logits_rows for work in emitting], drafts)
        by_id = {work.sequence: tokens for work, tokens in zip(emitting, emitted, strict=True)}
        return Outcome(self.clock.now_s() - start_s, by_id)

    def _inputs(self, step: Step, sequences: dict[int, Sequence]) -> tuple[Tensor, RaggedBatch, Tensor]:
        """Token ids [tokens], the ragged batch, and the rows [rows] whose logits are needed, on the host."""
        size = self.block_size
        held = [sequences[work.sequence].blocks for work in step.work]
        table = np.zeros((len(held), max(map(len, held))), dtype=np.int32)
        tokens: list[int] = []
        positions, slots, rows = [], [], []
        query_start = [0]
        for i, (work, blocks) in enumerate(zip(step.work, held, strict=True)):
            ids = sequences[work.sequence].token_ids
            assert ids is not None, "the runtime needs the tokens"
            table[i, : len(blocks)] = blocks
            tokens += ids[work.start : work.context]
            tokens += work.drafts
            position = np.arange(work.start, work.context)
            positions.append(position)
            slots.append(table[i, position // size].astype(np.int64) * size + position % size)
            query_start.append(len(tokens))
            rows.append(np.arange(len(tokens) - work.logits_rows, len(tokens)))
        batch = RaggedBatch(
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            context_len=torch.tensor([work.context for work in step.work], dtype=torch.int32),
            block_table=torch.from_numpy(table),
            most_queries=max(map(len, positions)),
            seats=torch.tensor([self.seats.of[work.sequence] for work in step.work]),
        )
        return torch.tensor(tokens), batch, torch.from_numpy(np.concatenate(rows))


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
