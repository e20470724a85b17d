"""Which tokens would a cheap guess propose next?"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from membound.roofline.techniques import NgramDrafts
from membound.simulator.scheduling.request import Draft, Sequence


class Room(NamedTuple):
    """How much may be proposed for a sequence: tokens one behind the other, and guesses in all."""

    depth: int
    guesses: int

    @property
    def chain(self) -> int:
        """Tokens of a chain."""
        return min(self.depth, self.guesses)


class Drafter(Protocol):
    """Proposes tokens for the sequences that decode, for all of them in one go.

    One that computes writes K and V of up to `computed_guesses` guesses of a sequence, so that it needs their blocks
    before it proposes them.
    """

    computed_guesses: int

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        """What each sequence's room allows; an empty draft where there is nothing to propose."""


def prompt_lookup(token_ids: list[int], max_ngram: int, min_ngram: int, limit: int) -> tuple[int, ...]:
    """The tokens that followed the latest earlier occurrence of the longest suffix that occurred before.

    Suffixes of `max_ngram` down to `min_ngram` tokens are tried; at most `limit` tokens are returned.
    Source: Saxena, prompt lookup decoding (2023); the same rule as vLLM's n-gram proposer.
    """
    end = len(token_ids)
    if limit <= 0:
        return ()
    for size in range(min(max_ngram, end - 1), min_ngram - 1, -1):
        suffix = token_ids[end - size :]
        for start in range(end - size - 1, -1, -1):
            if token_ids[start : start + size] == suffix:
                return tuple(token_ids[start + size : start + size + limit])
    return ()


class NgramDrafter:
    """Prompt lookup over the sequence's own tokens."""

    computed_guesses = 0

    def __init__(self, drafts: NgramDrafts) -> None:
        self.drafts = drafts

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        return [self._found(sequence, room.chain) for sequence, room in zip(sequences, rooms, strict=True)]

    def _found(self, sequence: Sequence, limit: int) -> Draft:
        assert sequence.token_ids is not None, "prompt lookup needs the tokens"
        d = self.drafts
        return Draft(prompt_lookup(sequence.token_ids, d.max_ngram, d.min_ngram, min(d.gamma, limit)))
