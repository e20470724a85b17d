"""How do heads on the model's last hidden state guess several positions ahead? (Medusa, Cai et al., 2024)"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import Kernels
from membound.runtime.linear import KernelLinear, Linear
from membound.runtime.speculation.base import Paths
from membound.runtime.speculation.heads import Head
from membound.runtime.speculation.trees import independent_draft
from membound.simulator.scheduling.drafter import Room
from membound.simulator.scheduling.request import Draft, Sequence, Step

BRANCHES = 8  # guesses of a head that are considered


class MedusaHeads:
    """Head k guesses the token k + 2 behind a hidden state h: lm_head(h + silu(W_k h)), with the model's lm_head."""

    def __init__(self, head: Head, lm_head: Tensor, kernels: Kernels) -> None:
        """`lm_head` [vocab, hidden] is the model's, of which the guessable rows are kept."""

        def packed(weight: Tensor) -> Linear:
            return KernelLinear(kernels, kernels.pack(weight.to(lm_head.device), "bf16"))

        count = sum(name.startswith("heads.") for name in head.tensors)
        self.residuals = [packed(head.tensors[f"heads.{index}"]) for index in range(count)]
        self.tokens = head.tokens.to(lm_head.device)
        self.lm_head = packed(lm_head[self.tokens])

    @torch.inference_mode()
    def __call__(self, normed: Tensor, heads: int) -> Tensor:
        """Logits [rows, heads, guessable] of the first heads, of the model's normed hidden states [rows, hidden]."""
        states = torch.stack([normed + functional.silu(residual(normed)) for residual in self.residuals[:heads]], dim=1)
        rows, count, hidden = states.shape
        return self.lm_head(states.reshape(rows * count, hidden)).float().view(rows, count, -1)


class MedusaProposer:
    """A tree of up to `guesses` guesses of the heads for each sequence, the best by their own chances."""

    reads_hidden = True

    def __init__(self, heads: MedusaHeads, depth: int, guesses: int) -> None:
        self.heads = heads
        self.depth = min(depth, len(heads.residuals))
        self.guesses = guesses
        self.computed_guesses = 0  # the heads keep nothing of what they guess
        self._last: dict[int, Tensor] = {}  # the hidden state that a sequence's newest token was chosen from

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        pairs = zip(sequences, rooms, strict=True)
        ready = [seq.id for seq, room in pairs if room.chain > 0 and seq.id in self._last]
        if not ready:
            return [Draft()] * len(sequences)
        logits = self.heads(torch.stack([self._last[id] for id in ready]), self.depth)
        best = torch.softmax(logits, dim=-1).topk(min(BRANCHES, logits.shape[-1]), dim=-1)
        chances, tokens = best.values.tolist(), self.heads.tokens[best.indices].tolist()
        row = {id: i for i, id in enumerate(ready)}
        drafts = []
        for sequence, room in zip(sequences, rooms, strict=True):
            if sequence.id not in row:
                drafts.append(Draft())
                continue
            depth = min(self.depth, room.depth)
            at = row[sequence.id]
            ranked = [list(zip(tokens[at][d], chances[at][d], strict=True)) for d in range(depth)]
            drafts.append(independent_draft(ranked, min(self.guesses, room.guesses)))
        return drafts

    def capture(self, max_blocks: int, max_num_seqs: int) -> str | None:
        on_gpu = self.heads.tokens.device.type == "cuda"
        return "drafts without CUDA graphs: all heads together are a few kernels" if on_gpu else None

    def drawn_from(self, sequence: int) -> Tensor | None:
        return None

    def observe(self, step: Step, live: Container[int], normed: Tensor | None, paths: Paths) -> None:
        """Keeps the hidden state of each sequence's last accepted token."""
        assert normed is not None, "it reads hidden states"
        self._last = {id: state for id, state in self._last.items() if id in live}
        first = 0
        for work in step.work:
            if work.emits:
                path = paths[work.sequence]
                known = work.tokens - len(work.drafts)
                self._last[work.sequence] = normed[first + known + path[-1] if path else first + known - 1]
            first += work.tokens
