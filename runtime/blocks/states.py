"""What does a recurrent layer keep for each sequence?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.ragged import GuessedBatch

Inputs = TypeVar("Inputs", bound=tuple[Tensor, ...])  # several, [tokens, ...] each


class SeatStates:
    """Tensors [seats, ...] by name: the state of the sequence that has each seat, whatever it is before it begins."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self.parts = dict(parts)
        self._before_guesses: dict[str, Tensor] = {}

    @classmethod
    def zeroed(cls, seats: int, device: torch.device, **shapes: tuple[int, ...]) -> SeatStates:
        """fp32 states of these shapes a seat."""
        return cls({name: torch.zeros(seats, *shape, device=device) for name, shape in shapes.items()})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def kept(self) -> Sequence[Tensor]:
        """All that is known of the tokens before."""
        return list(self.parts.values())

    def advance(
        self, name: str, batch: RaggedBatch, inputs: Inputs, kernel: Callable[[Tensor, Inputs, RaggedBatch], Tensor]
    ) -> Tensor:
        """What `kernel` makes of `inputs` and a part, which moves on in place by all tokens of the batch.

        Where some are guesses it is kept as it is before them, so that `restore` finds it.
        """
        state = self.parts[name]
        if not isinstance(batch, GuessedBatch):
            return kernel(state, inputs, batch)
        known = kernel(state, _rows(inputs, batch.known_rows), batch.known)
        seats = batch.guesses.seats
        assert seats is not None, "whoever splits a batch knows them"
        if name not in self._before_guesses:
            self._before_guesses[name] = torch.empty_like(state)
        self._before_guesses[name][seats] = state[seats]
        guessed = kernel(state, _rows(inputs, batch.guess_rows), batch.guesses)
        out = known.new_empty(batch.num_tokens, *known.shape[1:])
        out[batch.known_rows], out[batch.guess_rows] = known, guessed
        return out

    def restore(self, seats: Sequence[int]) -> None:
        """All parts of these seats are as they were before the guesses of the last step that brought them any."""
        for name, state in self.parts.items():
            rows = torch.as_tensor(seats, device=state.device)
            state[rows] = self._before_guesses[name][rows]


def _rows(inputs: Inputs, rows: Tensor) -> Inputs:
    return cast(Inputs, tuple(part[rows] for part in inputs))
