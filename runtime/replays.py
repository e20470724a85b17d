"""How does a step run on a CPU without the interpreter between its hundreds of kernels?

The first step through some layers over a KV cache is recorded on a tape, and later ones play it: a decode step of a
small model otherwise spends a third of its time in Python. Layers that torch computes a part of run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.blocks.base import LayerCache

FEWEST_ROWS = 64
MOST_ROWS = 1024  # beyond it, the interpreter is a small part of a step

Stack = Callable[[Tensor], Tensor]


class Tape(Protocol):
    """What `CpuKernels.recording` returns."""

    rows: int | None
    problem: str | None

    def play(self, batch: RaggedBatch | None = None) -> None: ...


class Replays:
    """The tapes of one decoder: one for each KV cache and number of layers, as long as the cache lives."""

    def __init__(self, kernels: Any) -> None:
        self._record = getattr(kernels, "recording", None)
        self._known: WeakKeyDictionary[LayerCache, dict[Hashable, _Known]] = WeakKeyDictionary()

    def run(
        self,
        stack: Stack,
        residual: Tensor,
        batch: RaggedBatch,
        cache: Sequence[LayerCache],
        layers: int | None,
        way: Hashable = None,
    ) -> Tensor:
        """What `stack` makes of `residual` [tokens, hidden], which changes in place: the normed states.

        `stack` is the first `layers` layers over `cache`, computed in some `way`: the same operations whenever these
        are the same.
        """
        tokens = residual.shape[0]
        if self._record is None or not cache or tokens > MOST_ROWS or batch.num_tokens != tokens:
            return stack(residual)
        known = self._known.setdefault(cache[0], {}).setdefault((len(cache), layers, way), _Known())
        if tokens >= known.torch_from:
            return stack(residual)
        if known.recorded is None or tokens > known.recorded.rows:
            return self._recorded(known, stack, residual, batch)
        return known.recorded.play(residual, batch)

    def _recorded(self, known: _Known, stack: Stack, residual: Tensor, batch: RaggedBatch) -> Tensor:
        """Runs the stack, and records it where it can be played again."""
        assert self._record is not None, "the caller has checked it"
        tokens = residual.shape[0]
        rows = max(FEWEST_ROWS, 1 << (tokens - 1).bit_length())
        states = residual.new_empty(rows, residual.shape[1])
        states[:tokens] = residual
        with self._record(rows, batch) as tape:
            normed = stack(states[:tokens])
        residual.copy_(states[:tokens])
        if tape.problem is not None or normed.shape != residual.shape:
            known.failed(tokens)
        else:
            known.recorded = _Recorded(tape, states, normed)
        return normed.clone()


@dataclass
class _Known:
    """What was recorded last, and from how many tokens on torch computes a part."""

    recorded: _Recorded | None = None
    torch_from: int = MOST_ROWS + 1
    doubtful_from: int = MOST_ROWS + 1

    def failed(self, tokens: int) -> None:
        """Torch computed a part of a step: for once, such as what is kept from then on, or in each."""
        if tokens >= self.doubtful_from:
            self.torch_from = min(self.torch_from, tokens)
        self.doubtful_from = min(self.doubtful_from, tokens)


class _Recorded:
    """A tape, where it finds the hidden states of up to `rows` tokens, and where it leaves their norm."""

    def __init__(self, tape: Tape, states: Tensor, normed: Tensor) -> None:
        assert tape.rows is not None, "it is for other steps, too"
        self.rows = tape.rows
        self._tape = tape
        self._states = states
        # `normed` was made for fewer tokens, but its memory has room for all rows.
        self._normed = torch.as_strided(normed, (self.rows, normed.shape[1]), (normed.shape[1], 1))

    def play(self, residual: Tensor, batch: RaggedBatch) -> Tensor:
        states = self._states[: residual.shape[0]]
        states.copy_(residual)
        self._tape.play(batch)
        residual.copy_(states)
        return self._normed[: residual.shape[0]].clone()
