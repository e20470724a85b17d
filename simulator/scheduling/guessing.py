"""How many guesses does each sequence verify in a step, where nobody knows what they say?

A simulated drafter proposes no tokens, so that a step of many sequences with guesses is a few numbers of each: nothing
is listed, and no object is made for a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from membound.roofline.techniques import Drafts
from membound.simulator.scheduling.blocks import BlockPool
from membound.simulator.scheduling.decoders import Decoders
from membound.simulator.scheduling.request import Guess, Sequence

_64_BITS = (1 << 64) - 1


class ModelledDrafter:
    """Stands for a drafter where nobody knows what it would propose: a draft is found in `hit_rate` of the steps."""

    def __init__(self, drafts: Drafts, seed: int) -> None:
        self.drafts = drafts
        self._always = drafts.hit_rate >= 1.0
        self._least = int(drafts.hit_rate * 2.0**64)
        self._seed = (2 * seed + 1) * 0x9E3779B97F4A7C15 & _64_BITS

    def finds(self, sequence: Sequence, tokens: int) -> bool:
        """Whether there is a draft behind so many tokens of a sequence.

        Drawn from (seed, request, position), so a request meets the same content under every schedule.
        """
        if self._always:
            return True
        # Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014: the mix of SplitMix64
        x = self._seed + sequence.id * 0xD1B54A32D192ED03 + tokens * 0x8CB92BA72F3D8DD7 & _64_BITS
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _64_BITS
        return x ^ x >> 31 < self._least


class Guesses(NamedTuple):
    """Guesses of a step: of each sequence that has any, in all, the blocks that they need, and the pairs of tokens that
    attention has more than without them."""

    each: tuple[Guess, ...] = ()
    total: int = 0
    blocks: int = 0
    attended: float = 0.0


NO_GUESSES = Guesses()


def guesses_of(
    decoders: Decoders, drafter: ModelledDrafter, longest: int, spare: int, pool: BlockPool | None
) -> Guesses:
    """Up to `longest` guesses for each sequence that decodes, with the tokens and blocks that others have left.

    The step emits one token beyond the accepted guesses, so that the last token is never worth one. Without `pool` a
    sequence has its blocks already.
    """
    each: list[Guess] = []
    steps, size, attended = decoders.steps, 1 if pool is None else pool.block_size, 0.0
    tokens_left, free = spare, 0 if pool is None else pool.available
    blocks_left = free
    for sequence in decoders.members.values():
        count = min(longest, sequence.ends_at - steps - 1, tokens_left)
        if count <= 0:
            continue
        tokens = sequence.standing + steps
        if not drafter.finds(sequence, tokens):
            continue
        if pool is not None:
            blocks = (tokens + count - 1) // size - (tokens - 1) // size
            if blocks > blocks_left:
                continue
            blocks_left -= blocks
        tokens_left -= count
        each.append((sequence, count))
        attended += count * (tokens - 1) + (count * count + 3 * count) / 2
    return Guesses(tuple(each), spare - tokens_left, free - blocks_left, attended)
