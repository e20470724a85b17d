"""How are the tokens of several sequences laid out when one pass computes them together?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch

MOST_IN_TREE = 64  # new tokens of a sequence in a batch with trees: each has a bit


class Part(NamedTuple):
    """One sequence's new tokens: `tokens` of them from position `start` on, the last `guesses` of which are guesses.

    Guess i follows guess `parents[i]`, or for -1 the token before the first guess, and takes the position behind it;
    without `parents` each follows the one before. Where all are guesses, -1 is the newest token before `start`. K and V
    take the slot of the place in the batch.
    """

    start: int
    tokens: int
    blocks: Sequence[int]
    seat: int = 0
    guesses: int = 0
    parents: tuple[int, ...] | None = None


def ragged_batch(parts: Sequence[Part], block_size: int) -> RaggedBatch:
    """The batch of all parts, on the host; with a tree where one of them has one."""
    table = np.zeros((len(parts), max(len(part.blocks) for part in parts)), dtype=np.int32)
    positions, slots = [], []
    for row, part in enumerate(parts):
        table[row, : len(part.blocks)] = part.blocks
        places = np.arange(part.start, part.start + part.tokens)
        slots.append(table[row, places // block_size].astype(np.int64) * block_size + places % block_size)
        positions.append(places if part.parents is None else part.start + _depths(part))
    sizes = [part.tokens for part in parts]
    tree = None
    if any(part.parents is not None for part in parts):
        tree = torch.from_numpy(np.concatenate([_sight(part) for part in parts]).view(np.int64))
    return RaggedBatch(
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=torch.from_numpy(np.concatenate(slots)),
        query_start=torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)),
        context_len=torch.tensor([part.start + part.tokens for part in parts], dtype=torch.int32),
        block_table=torch.from_numpy(table),
        most_queries=max(sizes),
        seats=torch.tensor([part.seat for part in parts]),
        tree=tree,
    )


@dataclass(frozen=True, kw_only=True)
class GuessedBatch(RaggedBatch):
    """A batch of known tokens and of guesses behind them, for layers that must know where the known ones end.

    `known` and `guesses` are batches of their own, whose tokens are `known_rows` and `guess_rows` of this one.
    """

    known: RaggedBatch
    guesses: RaggedBatch
    known_rows: Tensor
    guess_rows: Tensor

    def to(self, device: torch.device) -> GuessedBatch:
        whole = super().to(device)
        parts = {name: getattr(self, name).to(device) for name in ("known", "guesses", "known_rows", "guess_rows")}
        return GuessedBatch(**vars(whole) | parts)


def guessed_batch(parts: Sequence[Part], block_size: int) -> RaggedBatch:
    """The batch of all parts, which are chains; where one of them has guesses, as known tokens and guesses."""
    whole = ragged_batch(parts, block_size)
    behind = [part for part in parts if part.guesses]
    if not behind:
        return whole
    known = [part._replace(tokens=part.tokens - part.guesses, guesses=0) for part in parts]
    guesses = [
        part._replace(start=part.start + part.tokens - part.guesses, tokens=part.guesses, guesses=0) for part in behind
    ]
    is_guess = torch.cat([torch.arange(part.tokens) >= part.tokens - part.guesses for part in parts])
    return GuessedBatch(
        **vars(whole),
        known=ragged_batch(known, block_size),
        guesses=ragged_batch(guesses, block_size),
        known_rows=torch.nonzero(~is_guess).flatten(),
        guess_rows=torch.nonzero(is_guess).flatten(),
    )


def slots_of(blocks: Sequence[int], places: Sequence[int], block_size: int) -> list[int]:
    """The slots of some places of a sequence."""
    return [blocks[place // block_size] * block_size + place % block_size for place in places]


def _depths(part: Part) -> np.ndarray:
    """How far each new token of a tree lies behind the first."""
    known = part.tokens - part.guesses
    depths = list(range(known))
    for parent in part.parents or ():
        depths.append(depths[known + parent] + 1 if known + parent >= 0 else 0)
    return np.array(depths)


def _sight(part: Part) -> np.ndarray:
    """Which new tokens each new token sees, as bits: [tokens] uint64."""
    assert part.tokens <= MOST_IN_TREE, "a bit for each new token"
    known = part.tokens - part.guesses
    parents = range(-1, part.guesses - 1) if part.parents is None else part.parents
    sight = [(1 << (place + 1)) - 1 for place in range(known)]
    for guess, parent in enumerate(parents):
        before = sight[known + parent] if known + parent >= 0 else 0
        sight.append(before | 1 << (known + guess))
    return np.array(sight, dtype=np.uint64)
