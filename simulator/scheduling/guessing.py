"""Which guesses does a step verify, with the tokens and blocks that every sequence's own token leaves?

A drafter that proposes tokens has them listed. A modelled one proposes none, so that a step of many sequences with
guesses is a few numbers of each, and no object is made for a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from membound.roofline.techniques import Drafts
from membound.simulator.scheduling.blocks import BlockPool, BlockTables
from membound.simulator.scheduling.decoders import Decoders
from membound.simulator.scheduling.draft_length import AdaptiveLength
from membound.simulator.scheduling.drafter import Drafter, Room
from membound.simulator.scheduling.request import Draft, Guess, Sequence
from membound.simulator.scheduling.reservation import Reserving

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
    """Guesses of a step: of each sequence that has any, in all, the blocks that they need on each rank, and the pairs
    of tokens that attention has more than without them."""

    each: tuple[Guess, ...] = ()
    total: int = 0
    blocks: tuple[int, ...] = ()
    attended: float = 0.0


NO_GUESSES = Guesses()


def guesses_of(
    decoders: Decoders, drafter: ModelledDrafter, longest: int, spare: int, pools: tuple[BlockPool, ...]
) -> Guesses:
    """Up to `longest` guesses for each sequence that decodes, with the tokens and blocks that others have left.

    The step emits one token beyond the accepted guesses, so that the last token is never worth one. Without `pools`,
    one of each rank, a sequence has its blocks already.
    """
    each: list[Guess] = []
    steps, size, attended = decoders.steps, pools[0].block_size if pools else 1, 0.0
    tokens_left, free = spare, [pool.available for pool in pools]
    blocks_left = free.copy()
    for sequence in decoders.members.values():
        count = min(longest, sequence.ends_at - steps - 1, tokens_left)
        if count <= 0:
            continue
        tokens = sequence.standing + steps
        if not drafter.finds(sequence, tokens):
            continue
        if pools:
            blocks = (tokens + count - 1) // size - (tokens - 1) // size
            if blocks > blocks_left[sequence.rank]:
                continue
            blocks_left[sequence.rank] -= blocks
        tokens_left -= count
        each.append((sequence, count))
        attended += count * (tokens - 1) + (count * count + 3 * count) / 2
    taken = tuple([before - left for before, left in zip(free, blocks_left, strict=True)])
    return Guesses(tuple(each), spare - tokens_left, taken, attended)


class Proposing:
    """Asks a drafter, and takes the blocks of what it proposes. Each step emits one token beyond the accepted guesses,
    so that the last token is never worth one."""

    def __init__(
        self,
        decoders: Decoders,
        pools: tuple[BlockPool, ...],
        max_batched_tokens: int,
        lengths: AdaptiveLength | None,
        tables: BlockTables | None,
        reserving: Reserving,
    ) -> None:
        self.decoders = decoders
        self.pools = pools
        self.max_batched_tokens = max_batched_tokens
        self.lengths = lengths
        self.tables = tables
        self.reserving = reserving

    @property
    def _grows(self) -> bool:
        return self.reserving.tokens is None

    def counted(self, drafter: ModelledDrafter) -> Guesses:
        """Guesses of which only the number is known."""
        longest, members = drafter.drafts.gamma, self.decoders.members
        if self.lengths is not None:
            longest = min(longest, self.lengths.choose(list(members.values())))
        spare = self.max_batched_tokens - len(members)
        guesses = guesses_of(self.decoders, drafter, longest, spare, self.pools if self._grows else ())
        for pool, blocks in zip(self.pools, guesses.blocks, strict=False):
            pool.take(blocks)
        return guesses

    def listed(self, drafter: Drafter) -> tuple[dict[int, Draft], Guesses]:
        """Drafts by sequence, and how many guesses and blocks they are."""
        drafts: dict[int, Draft] = {}
        members = list(self.decoders.members.values())
        tokens_left, taken = self.max_batched_tokens - len(members), [0] * len(self.pools)
        spare = tokens_left
        rooms = [Room(sequence.remaining - 1, spare) for sequence in members]
        if self.lengths is not None:
            length = self.lengths.choose(members)
            rooms = [Room(min(room.depth, length), min(spare, self.lengths.guesses(length))) for room in rooms]
        if drafter.computed_guesses and self.tables is not None:
            rooms = self._with_blocks(drafter, members, rooms, self.tables)
        for sequence, found in zip(members, drafter.draft(members, rooms), strict=True):
            found = found.first(tokens_left)
            count, blocks, pool = len(found.tokens), 0, self.pools[sequence.rank]
            if self._grows:
                blocks = pool.blocks_for(sequence.tokens + count) - pool.blocks_for(sequence.tokens)
            if count and blocks <= pool.available:
                pool.take(blocks)
                taken[sequence.rank] += blocks
                drafts[sequence.id] = found
                tokens_left -= count
        return drafts, Guesses((), spare - tokens_left, tuple(taken))

    def _with_blocks(
        self, drafter: Drafter, members: list[Sequence], rooms: list[Room], tables: BlockTables
    ) -> list[Room]:
        """Numbers the blocks of what may be drafted, as far as free ones reach; the step's plan takes the rest back."""
        size = self.pools[0].block_size
        for sequence in members:
            tables.hold(sequence, self.reserving.held(sequence.request, sequence.tokens))
        bounded = []
        for sequence, room in zip(members, rooms, strict=True):
            reachable = len(sequence.blocks) + (tables.free if self._grows else 0)
            most = min(room.guesses, drafter.computed_guesses, reachable * size - sequence.tokens)
            if self._grows:
                tables.hold(sequence, sequence.tokens + most)
            bounded.append(Room(room.depth, most))
        return bounded
