"""Which new tokens does each sequence bring to a layer with a state, and does it begin with them?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check

FLOATS = (torch.float32, *check.HALVES)


@dataclass(frozen=True, eq=False)
class Steps:
    """Sequence i brings tokens `query_start[i] : query_start[i + 1]` (int32).

    Its state counts as zero where the first of them has position 0 in `positions` [tokens] (int64).
    """

    query_start: Tensor
    positions: Tensor

    @staticmethod
    def checked(slots: Tensor, steps: Steps | None, tokens: int, like: Tensor) -> int:
        """The number of sequences; raises ValueError, which names the argument, where these do not fit."""
        check.tensor("slots", slots, [tokens if steps is None else None], [torch.int64], like)
        if steps is not None:
            check.tensor("steps.query_start", steps.query_start, [slots.shape[0] + 1], [torch.int32], like)
            check.tensor("steps.positions", steps.positions, [tokens], [torch.int64], like)
        return slots.shape[0]

    @staticmethod
    def pointers(steps: Steps | None) -> tuple[Tensor | None, Tensor | None]:
        """Of a kernel that calls `span_of`."""
        return (None, None) if steps is None else (steps.query_start, steps.positions)


@triton.jit
def span_of(query_start, positions, sequence):
    """A sequence's first token, the one behind its last, and whether it begins: without steps the i-th token alone."""
    first = sequence
    end = sequence + 1
    fresh = sequence * 0
    if query_start is not None:
        first = tl.load(query_start + sequence).to(tl.int64)
        end = tl.load(query_start + sequence + 1).to(tl.int64)
        fresh = (tl.load(positions + first, mask=first < end, other=1) == 0).to(tl.int64)
    return first, end, fresh
