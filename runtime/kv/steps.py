"""What must the stores of all layers know of a step, beyond its batch?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.kv.scratch import seats_of, spans


@dataclass(frozen=True)
class PlacedBatch(RaggedBatch):
    """Tokens that decode, where the stores of all layers keep them: not in the scheduler's blocks any more."""


class PlacingStore(ABC):
    """A store that keeps or reads tokens elsewhere than a batch says, at the same places in all layers.

    A step of decode is placed once, before the layers: what they then do is the same in each such step.
    """

    @abstractmethod
    def placed(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch of a step that decodes as a PlacedBatch; another as it is."""


class SeatStore(PlacingStore):
    """A store of constant size at each seat: it has no blocks that other caches could share, swap or roll back.

    What asks for them is refused before a model is read.
    """

    @property
    def parts(self) -> tuple[Tensor, ...]:
        raise AssertionError("a cache of constant size has no blocks to move")

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        raise AssertionError("a cache of constant size has no blocks to move")

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        raise AssertionError("a cache of constant size has no blocks to move")

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        raise AssertionError("drafts and eviction exclude each other")


@dataclass(frozen=True)
class PromptPart:
    """A chunk of a prompt: rows `first` to `last` of the step, at a seat, behind `start` tokens."""

    first: int
    last: int
    seat: int
    start: int


@dataclass(frozen=True)
class SeatedStep:
    """A step as stores see it that keep a sequence at its seat: sequences that decode one token, and prompts.

    `rows` are those of the tokens that decode, None where all do; `seats` and `positions` are theirs.
    """

    rows: Tensor | None
    seats: Tensor
    positions: Tensor
    prompts: tuple[PromptPart, ...]

    @classmethod
    def of(cls, batch: RaggedBatch) -> SeatedStep:
        starts, ends = spans(batch)
        edges, seats, device = batch.query_start.tolist(), seats_of(batch), batch.positions.device
        decoding = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if start and end - start == 1]
        prompts = tuple(
            PromptPart(edges[i], edges[i + 1], seats[i], starts[i]) for i in range(len(starts)) if i not in decoding
        )
        rows = torch.tensor([edges[i] for i in decoding], device=device) if prompts else None
        decoding_seats, positions = (
            torch.tensor([values[i] for i in decoding], dtype=torch.int64, device=device) for values in (seats, starts)
        )
        return cls(rows, decoding_seats, positions, prompts)


Plan = TypeVar("Plan")


class LastStep(Generic[Plan]):
    """Keeps what was made of the last batch, so that the first layer makes it and the others find it."""

    def __init__(self) -> None:
        self._last: tuple[RaggedBatch, Plan] | None = None

    def of(self, batch: RaggedBatch, make: Callable[[], Plan]) -> Plan:
        if self._last is None or self._last[0] is not batch:
            self._last = batch, make()
        return self._last[1]
