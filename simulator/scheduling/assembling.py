"""What does a planned step consist of: its sums, its blocks, and, for an engine that computes, each sequence's work?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from membound.simulator.scheduling.decoders import Decoders
from membound.simulator.scheduling.guessing import Guesses
from membound.simulator.scheduling.holdings import Holdings
from membound.simulator.scheduling.request import Draft, Sequence, Step, Sums, Work, step_sums

_NO_DRAFT = Draft()


class Moved(NamedTuple):
    """Since the last step: blocks that crossed to or from the host on each rank, and tokens found in a cache."""

    blocks: tuple[int, ...]
    cached_tokens: int


class StepAssembly:
    """Makes steps of what the scheduler decided; an `itemized` one lists the work of every sequence."""

    def __init__(self, decoders: Decoders, holdings: Holdings, *, itemized: bool, drafting: bool) -> None:
        self.decoders = decoders
        self.holdings = holdings
        self.itemized = itemized
        self.drafting = drafting
        self._num_blocks = sum(pool.num_blocks for pool in holdings.pools)

    def of(
        self,
        decoding: bool,
        work_on_prompts: tuple[Work, ...],
        drafts: Mapping[int, Draft],
        guesses: Guesses,
        joined: list[Sequence],
        preempted: tuple[int, ...],
        prompts: Mapping[int, Sequence],
        moved: Moved,
        filling: bool,
    ) -> Step:
        """The step that computes those who decode, if `decoding`, and the work on `prompts` that are under way."""
        decoders, holdings = self.decoders, self.holdings
        members = len(decoders.members) if decoding else 0
        work: tuple[Work, ...] = ()
        if self.itemized:
            work = self._items(drafts) + work_on_prompts if decoding else work_on_prompts
            self._number(work, joined, prompts)
        decode_tokens = decoders.tokens
        kv_tokens = decode_tokens if decoding else 0
        windows = decoders.windows
        seen = decoders.seen if decoding and windows else ()
        if self.itemized:
            sums = step_sums(0, 0, work, windows)
        else:
            sums = step_sums(members, kv_tokens, work_on_prompts, windows, seen)
        if guesses.each:
            sums = _with_guesses(sums, guesses)
        steady = 1
        if not (work_on_prompts or preempted or self.itemized or self.drafting):
            steady = self._steady()
        crossed = sum(moved.blocks)
        prompt_tokens = sum([sequence.standing for sequence in prompts.values()]) if prompts else 0
        return Step(
            members,
            kv_tokens,
            work_on_prompts,
            work,
            tuple([sequence.id for sequence in joined if sequence.clock is None]) if joined else (),
            tuple([sequence.id for sequence in joined if sequence.clock is not None]) if joined else (),
            preempted,
            crossed,
            moved.cached_tokens,
            holdings.in_use,
            decode_tokens + prompt_tokens - holdings.repeated_tokens,
            self._num_blocks,
            steady,
            sums,
            guesses.each,
            max(moved.blocks) if crossed else 0,
            filling,
            decoders.growing if windows else (),
        )

    def _steady(self) -> int:
        """Steps that are equal to this one but for the tokens in the cache."""
        ends = self.decoders.steps_to_first_end()
        if ends <= 1:
            return 1
        ends = self.decoders.even_steps(ends)
        pools = enumerate(self.holdings.pools)
        return 1 + min([self.decoders.steps_within(pool.available, ends - 1, rank) for rank, pool in pools])

    def _items(self, drafts: Mapping[int, Draft]) -> tuple[Work, ...]:
        return tuple(
            Work(sequence.id, sequence.computed, 1 + len(guess.tokens), guess.tokens, parents=guess.parents)
            for sequence in self.decoders.members.values()
            for guess in (drafts.get(sequence.id, _NO_DRAFT),)
        )

    def _number(self, work: tuple[Work, ...], joined: list[Sequence], prompts: Mapping[int, Sequence]) -> None:
        """Gives the blocks of what is computed their numbers."""
        tables, reserving = self.holdings.tables, self.holdings.reserving
        if tables is None:
            return
        running = {sequence.id: sequence for sequence in (*self.decoders.members.values(), *prompts.values())}
        for item in work:
            sequence = running[item.sequence]
            tables.hold(sequence, reserving.held(sequence.request, max(item.context, sequence.tokens)))
        computing = {item.sequence for item in work}
        for sequence in joined:
            if sequence.clock is not None and sequence.id not in computing:
                # It came back, and waits for a step of those who decode.
                tables.hold(sequence, reserving.held(sequence.request, sequence.computed))


def _with_guesses(sums: Sums, guesses: Guesses) -> Sums:
    """The sums of a step that verifies these too: each guess is a token that is attended to, and has logits."""
    tokens, sequences, kv_tokens, attended, rows, *prompts = sums
    more = guesses.total
    return (tokens + more, sequences, kv_tokens + more, attended + guesses.attended, rows + more, *prompts)
