"""Which sequences decode, when will they end, and when do they need another block?"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from membound.simulator.scheduling.reach import reaches_of
from membound.simulator.scheduling.request import Guess, Outcome, Sequence


class Decoders:
    """Sequences that decode in lockstep: with each step all of them compute and emit a token.

    `steps` is their common clock. Nothing is done for a single sequence in a step: its tokens follow from the clock,
    the sum of all their tokens grows by their number, the next to end is on top of a heap, and those that need a new
    block are counted, on each of the data-parallel `ranks`, by the remainder of their tokens at step 0. With `grow`
    false, blocks were reserved before. Where some are `drafting` nobody knows when they end, and they are looked
    through after each step. Layers see at most so many tokens of each sequence as one of the `windows` has.
    """

    def __init__(
        self,
        block_size: int,
        grow: bool = True,
        drafting: bool = False,
        ranks: int = 1,
        windows: tuple[int, ...] = (),
    ) -> None:
        self.steps = 0
        self.members: dict[int, Sequence] = {}
        self._block_size = block_size
        self._grow = grow
        self._drafting = drafting
        self._standing = 0
        self._phases = [[0] * block_size for _ in range(ranks)]
        self.on_rank = [0] * ranks  # members
        self.windows = windows
        self._reaches = () if drafting else reaches_of(windows)
        self._ends: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.members)

    @property
    def tokens(self) -> int:
        """Tokens of all members: what they attend to in the next step."""
        return self._standing + len(self.members) * self.steps

    @property
    def seen(self) -> tuple[int, ...]:
        """Of these what layers with each of the windows see."""
        if self._drafting and self.windows:
            tokens = [sequence.tokens for sequence in self.members.values()]
            return tuple(sum([min(each, window) for each in tokens]) for window in self.windows)
        return tuple([reach.tokens(self.steps) for reach in self._reaches])

    @property
    def growing(self) -> tuple[int, ...]:
        """By how much that grows with each of the next `even_steps`; empty where nobody knows."""
        return tuple([reach.short for reach in self._reaches])

    def even_steps(self, most: int) -> int:
        """Steps, up to `most`, through which what layers see grows by as much each."""
        return min([most, *[reach.even_steps(self.steps) for reach in self._reaches]])

    def add(self, sequence: Sequence) -> None:
        """`sequence`, whose last token is not computed, decodes from the next step on."""
        sequence.standing -= self.steps
        sequence.clock = self
        self.members[sequence.number] = sequence
        self._standing += sequence.standing
        self._phases[sequence.rank][sequence.standing % self._block_size] += 1
        self.on_rank[sequence.rank] += 1
        for reach in self._reaches:
            reach.add(sequence.standing, self.steps)
        self._schedule_end(sequence)

    def remove(self, sequence: Sequence) -> None:
        """`sequence` no longer decodes; its tokens stand still."""
        del self.members[sequence.number]
        self._standing -= sequence.standing
        self._phases[sequence.rank][sequence.standing % self._block_size] -= 1
        self.on_rank[sequence.rank] -= 1
        for reach in self._reaches:
            reach.remove(sequence.standing, self.steps)
        sequence.standing += self.steps
        sequence.standing_computed = sequence.standing - 1
        sequence.clock = None
        sequence.ends_at = -1

    def emit_more(self, sequence: Sequence, tokens: int) -> None:
        """`sequence` has emitted `tokens` tokens beyond the one of the step: accepted drafts."""
        phases = self._phases[sequence.rank]
        phases[sequence.standing % self._block_size] -= 1
        self._standing += tokens
        sequence.standing += tokens
        phases[sequence.standing % self._block_size] += 1
        sequence.ends_at -= tokens

    def emit_guessed(self, guesses: tuple[Guess, ...], accepted: tuple[int, ...]) -> list[int]:
        """Of each sequence's guesses those that were accepted, beyond the token of the step; the blocks that they fill
        on each rank.

        One loop, since a step of speculation is little else.
        """
        size, before, emitted, blocks = self._block_size, self.steps - 2, 0, [0] * len(self._phases)
        for (sequence, _), tokens in zip(guesses, accepted, strict=True):
            if tokens:
                standing, rank = sequence.standing, sequence.rank
                phases = self._phases[rank]
                later = sequence.standing = standing + tokens
                phases[standing % size] -= 1
                phases[later % size] += 1
                sequence.ends_at -= tokens
                blocks[rank] += (later + before) // size - (standing + before) // size
                emitted += tokens
        self._standing += emitted
        return blocks if self._grow else [0] * len(blocks)

    def growth(self, rank: int = 0, steps_ahead: int = 0) -> int:
        """New blocks of a rank that the step after `steps_ahead` more needs: one for each whose blocks are full."""
        return self._phases[rank][(1 - self.steps - steps_ahead) % self._block_size] if self._grow else 0

    def growth_over(self, first: int, end: int, rank: int = 0) -> int:
        """New blocks of a rank that the steps `first` to `end - 1` from now on need."""
        if not self._grow:
            return 0
        size, phases = self._block_size, self._phases[rank]
        rounds, rest = divmod(end - first, size)
        last = (1 - self.steps - first) % size + 1
        begin = last - rest
        grown = sum(phases[max(begin, 0) : last])
        if begin < 0:
            grown += sum(phases[begin + size :])
        return rounds * self.on_rank[rank] + grown

    def growth_seconds(self, outcome: Outcome) -> float:
        """Block-seconds of the blocks that the steps of `outcome` after the first add."""
        if not self._grow:
            return 0.0
        first_s, slope_s, size = outcome.first_s, outcome.slope_s, self._block_size
        phases = self._phases[0] if len(self._phases) == 1 else [sum(each) for each in zip(*self._phases, strict=True)]
        if outcome.steps <= 3 * size:
            grown_s, left_s = 0.0, outcome.time_s - first_s
            for step in range(1, outcome.steps):
                grown_s += phases[(1 - self.steps - step) % size] * left_s
                left_s -= first_s + slope_s * step
            return grown_s
        later = np.arange(1, outcome.steps)
        blocks = np.asarray(phases)[(1 - self.steps - later) % size]
        before_s = later * (first_s + slope_s * (later - 1) / 2)
        return float(blocks @ (outcome.time_s - before_s))

    def steps_to_first_end(self) -> int:
        """Steps until the next member ends."""
        while True:
            ends_at, number = self._ends[0]
            if self._is_due(number, ends_at):
                return ends_at - self.steps
            heappop(self._ends)

    def steps_within(self, blocks: int, most: int, rank: int = 0) -> int:
        """How many steps beyond the next one, up to `most`, `blocks` new blocks of a rank suffice for."""
        members = self.on_rank[rank]
        enough = members * (1 + most // self._block_size)
        if not self._grow or blocks >= enough or blocks >= self.growth_over(1, 1 + most, rank):
            return most
        rounds = blocks // members
        steps, left = rounds * self._block_size, blocks - rounds * members
        while steps < most and (needed := self.growth(rank, steps + 1)) <= left:
            left -= needed
            steps += 1
        return steps

    def advance(self, steps: int) -> None:
        """All members have emitted `steps` tokens."""
        self.steps += steps
        for reach in self._reaches:
            reach.advance(self.steps)

    def take_ended(self) -> list[Sequence]:
        """Removes and returns the members that have emitted all their tokens."""
        ended = []
        if self._drafting:
            done = [sequence for sequence in self.members.values() if sequence.ends_at <= self.steps]
            for sequence in sorted(done, key=lambda sequence: sequence.number):
                self.remove(sequence)
                ended.append(sequence)
            return ended
        while self._ends and self._ends[0][0] <= self.steps:
            ends_at, number = heappop(self._ends)
            if self._is_due(number, ends_at):
                sequence = self.members[number]
                self.remove(sequence)
                ended.append(sequence)
        return ended

    def _is_due(self, number: int, ends_at: int) -> bool:
        """Whether an entry of the heap still holds: its sequence may have left."""
        sequence = self.members.get(number)
        return sequence is not None and sequence.ends_at == ends_at

    def _schedule_end(self, sequence: Sequence) -> None:
        sequence.ends_at = self.steps + sequence.remaining
        if not self._drafting:
            heappush(self._ends, (sequence.ends_at, sequence.number))
