"""What must a drafter that computes promise, and how does it choose its guesses?"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from membound.simulator.scheduling.drafter import Drafter
from membound.simulator.scheduling.request import Step

Paths = dict[int, tuple[int, ...]]  # by sequence the guesses that were accepted, one behind the other


class Proposer(Drafter, Protocol):
    """A drafter of the runtime. Where it `reads_hidden`, it needs the model's hidden states of every step."""

    reads_hidden: bool

    def capture(self, max_blocks: int, max_num_seqs: int) -> str | None:
        """Captures its steps for up to so many sequences of so many blocks, as CUDA graphs; in words what was done.

        On a CPU nothing is.
        """

    def drawn_from(self, sequence: int) -> Tensor | None:
        """The distributions [guesses, vocab] that the last draft of a sequence was drawn from; None: it is certain."""

    def observe(self, step: Step, live: Container[int], normed: Tensor | None, paths: Paths) -> None:
        """The model has computed a step: its normed hidden states [tokens, hidden], and which guesses it accepted.

        `live` are all sequences that have not ended.
        """


class Chosen(NamedTuple):
    """A token for each row, and the distributions [rows, vocab] that they were drawn from; None: they are certain."""

    tokens: list[int]
    drawn_from: Tensor | None


class Chooser:
    """Chooses a drafter's guesses: the most likely ones at temperature 0, else drawn as the model would draw."""

    def __init__(self, temperature: float, seed: int, device: torch.device | str) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Chosen:
        """A token for each row of `logits` [rows, vocab]."""
        if self.temperature == 0:
            return Chosen(logits.argmax(dim=-1).tolist(), None)
        q = torch.softmax(logits / self.temperature, dim=-1)
        return Chosen(torch.multinomial(q, 1, generator=self.generator)[:, 0].tolist(), q)
