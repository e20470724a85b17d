"""What does the engine compute next?

The scheduler is shared by the simulator and the runtime. It is pure: given the same requests, outcomes and block
pool it makes the same decisions, whatever the clock that it never sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from membound.roofline.scenario.engine import Reservation
from membound.simulator.scheduling.assembling import Moved, StepAssembly
from membound.simulator.scheduling.blocks import BlockPool, BlockTables
from membound.simulator.scheduling.decoders import Decoders
from membound.simulator.scheduling.draft_length import AdaptiveLength
from membound.simulator.scheduling.drafter import Drafter
from membound.simulator.scheduling.guessing import NO_GUESSES, ModelledDrafter, Proposing
from membound.simulator.scheduling.holdings import Holdings
from membound.simulator.scheduling.joining import Joining
from membound.simulator.scheduling.policies import Admission, Batching, Everybody, FirstCome, Order
from membound.simulator.scheduling.prefix import count_of
from membound.simulator.scheduling.request import Draft, Outcome, Request, Sequence, Step, Work
from membound.simulator.scheduling.reservation import Reserving
from membound.simulator.scheduling.waiting import WaitingLine

Classify = Callable[[Sequence], None]

FIRST_COME, EVERYBODY = FirstCome(), Everybody()


class Scheduler:
    """Holds the queue and the batch: `add` requests, `plan` a step, `commit` what came of it.

    The policies decide, this is the mechanism: sequences that decode each compute their newest token and their drafts,
    then prompts that were begun go on, then waiting ones join in the engine's order while `max_num_seqs`,
    `max_batched_tokens` and blocks allow. A prompt takes all its blocks when it joins. Where a sequence that decodes
    finds no block, the last in order is preempted: its tokens are recomputed later, or with `swap` its blocks wait on
    the host while there is room.

    With `itemized` each step lists the work of every sequence, which an engine that computes needs, and drafts whose
    tokens are known. Without, steps cost nothing for each sequence, and equal steps are planned as one, or count the
    guesses of a modelled drafter. The decisions are the same.
    With `reserved_tokens` a request takes all its blocks at once, in `chunks` those of the next power of two tokens.
    `tables` number the blocks of each sequence; the model takes no more than `max_context` tokens. `classify` sets the
    class, priority and deadline of one that arrives.

    With data parallelism `pool` is the first rank's and `others` those of the rest, equally large; a sequence that
    joins stays on its rank until it ends or is recomputed. Prefixes are found on that rank alone, and each has its own
    `max_batched_tokens`.

    Steps say what layers with each of the `windows` see of their sequences, each of which has its own length.

    In a pipeline a step is a round of up to `micro_batches` steps of the engine, each of `max_batched_tokens` tokens.
    A prompt, or a chunk of it, is in one of them.
    """

    def __init__(
        self,
        batching: Batching,
        pool: BlockPool,
        max_num_seqs: int,
        max_batched_tokens: int,
        drafter: Drafter | ModelledDrafter | None = None,
        lengths: AdaptiveLength | None = None,
        *,
        others: tuple[BlockPool, ...] = (),
        order: Order = FIRST_COME,
        admission: Admission = EVERYBODY,
        classify: Classify | None = None,
        swap: bool = False,
        reserved_tokens: int | Reservation | None = None,
        chunks: bool = False,
        itemized: bool = True,
        tables: BlockTables | None = None,
        max_context: int | None = None,
        micro_batches: int = 1,
        windows: tuple[int, ...] = (),
    ) -> None:
        counted = isinstance(drafter, ModelledDrafter)
        assert itemized or tables is None, "block tables need each sequence's work"
        assert tables is None or not others, "blocks of a single rank are numbered"
        assert drafter is None or itemized != counted, "drafts need each sequence's work, guesses that are counted none"
        self.batching = batching
        self.order = order
        self.admission = admission
        self.pool = pool
        self.pools = pool, *others
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.micro_batches = micro_batches
        self.drafter = drafter
        self.lengths = lengths
        self.classify = classify
        self.swap = swap
        self.reserved_tokens = reserved_tokens
        self.reserving = Reserving(reserved_tokens, chunks, max_context)
        self.itemized = itemized
        self.tables = tables
        for each in self.pools:
            if each.cache is not None:
                each.cache.keeper = tables
        self.max_context = max_context
        self.decoders = Decoders(
            pool.block_size,
            grow=reserved_tokens is None,
            drafting=drafter is not None,
            ranks=len(self.pools),
            windows=windows,
        )
        round_tokens = len(self.pools) * micro_batches * max_batched_tokens
        self._holdings = Holdings(self.pools, self.reserving, tables)
        self._steps = StepAssembly(self.decoders, self._holdings, itemized=itemized, drafting=drafter is not None)
        self._proposing = Proposing(self.decoders, self.pools, round_tokens, lengths, tables, self.reserving)
        self._line = WaitingLine()
        self._joining = Joining(
            batching,
            order,
            self._line,
            self.decoders,
            self._holdings,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            micro_batches=micro_batches,
        )
        self.prompts = self._joining.prompts
        self.preemptions = 0
        self._arrivals = 0
        self._draft_blocks: tuple[int, ...] = ()  # on each rank
        self._preempted: list[int] = []  # since the last step
        self._begun = False  # whether the batch has decoded since it was last empty
        self._filling = True  # whether nobody was under way before the step
        self._grown = False  # whether those who decode have the block of the token that they are about to compute

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait, in no order."""
        return list(self._line.members.values())

    @property
    def running(self) -> list[Sequence]:
        """Sequences that decode, then those whose prompts are being computed."""
        return [*self.decoders.members.values(), *self.prompts.values()]

    @property
    def num_running(self) -> int:
        return self._joining.num_running

    @property
    def has_work(self) -> bool:
        return bool(self._line) or self.num_running > 0

    def refusal(self, request: Request) -> str | None:
        """Why the engine can never serve `request`, or None."""
        pool, total = self.pool, request.tokens
        if self.max_context is not None and total > self.max_context:
            return f"{total} tokens are more than the {self.max_context} of the model's context; give shorter requests"
        if isinstance(self.reserved_tokens, int) and total > self.reserved_tokens:
            return f"{total} tokens are more than engine.reserved_tokens ({self.reserved_tokens}); raise it"
        taken = self.reserving.of(request) or total
        if pool.blocks_for(taken) > pool.num_blocks:
            fixed = pool.fixed_blocks
            beside = f", of which windows and states of a sequence take {fixed}" if fixed else ""
            return (
                f"{taken} tokens do not fit into {pool.num_blocks} KV blocks of {pool.block_size}{beside}; "
                "give shorter requests, more devices (parallel.tp), or fewer bits (kv_quantization, "
                "weight_quantization)"
            )
        if not self.batching.cuts_long_prompts and total > self.max_batched_tokens:
            return (
                f"{total} tokens exceed max_batched_tokens ({self.max_batched_tokens}), "
                f"and {self.batching.name} batching computes a prompt in one step; raise engine.max_batched_tokens, or "
                "set engine.batching to chunked_prefill"
            )
        return None

    def add(self, request: Request) -> Sequence:
        """Queues a request; one that is turned away is returned as rejected, with the reason, and not queued."""
        sequence = Sequence.of(request)
        self.queue(sequence)
        return sequence

    def queue(self, sequence: Sequence) -> None:
        """Queues a sequence, also one whose prompt was computed elsewhere."""
        sequence.number = self._arrivals
        self._arrivals += 1
        if self.classify is not None:
            self.classify(sequence)
        if sequence.reserved_blocks:
            sequence.key = -math.inf  # it goes first: others may need the blocks that it has
            self._line.join(sequence)
            return
        sequence.key = self.order.key(sequence)
        reason = self.refusal(sequence.request) or self.admission.refusal(sequence, len(self._line), self._tokens_ahead)
        if reason is None:
            self._line.join(sequence)
        else:
            sequence.status, sequence.reason = "rejected", reason

    def reserve(self, sequence: Sequence) -> bool:
        """Takes the blocks of one whose K and V are to come from elsewhere, before they do; False where no rank has
        them."""
        return self._joining.reserve(sequence)

    def plan(self) -> Step | None:
        """The next step, or None when nothing can be computed. Blocks for all its tokens are taken."""
        step = self._planned()
        while step is None and any(sequence.reserved_blocks for sequence in self._line.members.values()):
            step = self._planned()  # everybody was preempted for want of blocks that these have
        if step is not None:
            self._preempted.clear()
            self._joining.cached_tokens = 0
            if step.moved_blocks:
                self._joining.moved_blocks = [0] * len(self.pools)
        return step

    def _planned(self) -> Step | None:
        alone, self._filling = self.batching.prompts_alone, self.num_running == 0
        self._grown = False
        self._begun = self._begun and self.num_running > 0
        preempted: list[int] = []
        joined: list[Sequence] = []
        prompts: list[Work] = []
        if alone and (self._line or self.prompts):
            nothing = [0] * len(self.pools)
            prompts = self._joining.work(nothing, joined, join=self.batching.admits(self._begun))
        decoding = not prompts
        drafts: dict[int, Draft] = {}
        guesses = NO_GUESSES
        if decoding and self.decoders.members:
            self._begun = True
            self._make_room(preempted)
            if isinstance(self.drafter, ModelledDrafter):
                guesses = self._proposing.counted(self.drafter)
            elif self.drafter is not None:
                drafts, guesses = self._proposing.listed(self.drafter)
            self._draft_blocks = guesses.blocks
        if not alone and (self._line or self.prompts):
            guessed = -(-guesses.total // len(self.pools))
            taken = [decoding + guessed for decoding in self.decoders.on_rank]
            join = not preempted and self.batching.admits(self._begun)
            prompts = self._joining.work(taken, joined, join=join)
            if joined and not self._grown:  # who comes back has the block of its next token
                self._grown = any(sequence.clock is not None for sequence in joined)
        self._preempted += preempted
        if not prompts and not self.decoders.members:
            return None
        return self._steps.of(
            decoding,
            tuple(prompts),
            drafts,
            guesses,
            joined,
            tuple(self._preempted),
            self.prompts,
            Moved(tuple(self._joining.moved_blocks), self._joining.cached_tokens),
            self._filling,
        )

    def usage(self, step: Step, outcome: Outcome) -> tuple[float, float]:
        """Block-seconds in use and token-seconds held in them, of a planned step that came to `outcome`."""
        held = step.held_tokens * outcome.time_s
        used = step.blocks_used * outcome.time_s
        if outcome.steps == 1:
            return used, held
        k = outcome.steps
        later = outcome.first_s * k * (k - 1) / 2 + outcome.slope_s * (k - 1) * k * (2 * k - 1) / 6
        return used + self.decoders.growth_seconds(outcome), held + step.decoding * later

    def commit(self, step: Step, outcome: Outcome) -> list[Sequence]:
        """Applies what the step emitted and returns the sequences that ended, their blocks released."""
        ended: list[Sequence] = []
        self._grown = False
        if step.decoding:
            if outcome.steps > 1:
                for rank, pool in enumerate(self.pools):
                    pool.take(self.decoders.growth_over(1, outcome.steps, rank))
            for pool, blocks in zip(self.pools, self._draft_blocks, strict=False):
                pool.give(blocks)
            self._draft_blocks = ()
            members = [] if outcome.emitted is None else list(self.decoders.members.values())
            self.decoders.advance(outcome.steps)
            for sequence in members:
                self._accept(sequence, outcome)
            if step.guesses:  # of the blocks for guesses, those of accepted ones stay
                filled = self.decoders.emit_guessed(step.guesses, outcome.accepted)
                for pool, blocks in zip(self.pools, filled, strict=True):
                    pool.take(blocks)
            ended = self.decoders.take_ended()
        for work in step.prompts:
            self._advance_prompt(work, outcome, ended)
        for sequence in ended:
            sequence.status = "completed"
            self._holdings.release(sequence, self._holdings.of(sequence, sequence.computed))
        return ended

    def check_integrity(self) -> None:
        """Asserts that no block is lost or shared and that no sequence is in two places."""
        everybody = [*self.running, *self.waiting]
        ids = [sequence.id for sequence in everybody]
        assert len(ids) == len(set(ids)), "a sequence is in two places"
        self._line.check_integrity()
        for rank, pool in enumerate(self.pools):
            here = [sequence for sequence in self.running if sequence.rank == rank]
            assert len(here) <= self._joining.seats_of_rank, "a rank has more sequences than seats"
            shared = 0 if pool.cache is None else pool.cache.used + pool.cache.unused
            held = sum(self._blocks(sequence) - count_of(sequence.cached) for sequence in here)
            guessed = self._draft_blocks[rank] if self._draft_blocks else 0
            guessed += sum(each.reserved_blocks for each in self._joining.reserved.values() if each.rank == rank)
            assert held + guessed + shared == pool.used, "a block was lost or is counted twice"
            if pool.cache is not None:
                pool.cache.check_integrity([sequence.cached for sequence in here])
        if self.tables is not None:
            self.tables.check_integrity(everybody)
            assert self.tables.used == self.pool.used, "counted and numbered blocks differ"

    def _advance_prompt(self, work: Work, outcome: Outcome, ended: list[Sequence]) -> None:
        """The tokens of `work` are computed; with the last of a prompt its sequence emits a token and decodes."""
        sequence = self.prompts[work.sequence]
        sequence.standing_computed = work.context
        if not work.emits:
            return
        del self.prompts[work.sequence]
        if self.pool.cache is not None:
            self._holdings.share(sequence)
        sequence.standing += 1
        if sequence.token_ids is not None:
            assert outcome.emitted is not None, "content is known"
            sequence.token_ids.append(outcome.emitted[sequence.id][0])
        if sequence.finished:
            ended.append(sequence)
        else:
            self.decoders.add(sequence)

    def _make_room(self, preempted: list[int]) -> None:
        """Takes a block for everybody who needs one for the next token, from those last in order if need be."""
        for rank, pool in enumerate(self.pools):
            while (needed := self.decoders.growth(rank)) > pool.available:
                here = (sequence for sequence in self.running if sequence.rank == rank)
                victim = max(here, key=lambda sequence: (sequence.key, sequence.number))
                self._preempt(victim)
                preempted.append(victim.id)
            pool.take(needed)
        self._grown = True

    def _accept(self, sequence: Sequence, outcome: Outcome) -> None:
        """Every emitted token but the newest was an accepted draft, so its K and V are already in place."""
        assert outcome.emitted is not None, "each sequence's tokens are known"
        emitted = outcome.emitted[sequence.id]
        wanted = sequence.remaining + 1
        if sequence.token_ids is not None:
            sequence.token_ids.extend(emitted[:wanted])
        if len(emitted) > 1:
            before = sequence.computed
            self.decoders.emit_more(sequence, min(len(emitted), wanted) - 1)
            if self.reserved_tokens is None:  # of the blocks for drafts, those of accepted ones stay
                pool = self.pools[sequence.rank]
                pool.take(pool.blocks_for(sequence.computed) - pool.blocks_for(before))
        if self.tables is not None:
            self.tables.hold(sequence, self.reserving.held(sequence.request, sequence.computed))

    def _preempt(self, sequence: Sequence) -> None:
        held, pool = self._blocks(sequence), self.pools[sequence.rank]
        if sequence.clock is None:
            del self.prompts[sequence.id]
        else:
            self.decoders.remove(sequence)
            if self.swap and held <= pool.host_free and not sequence.cached:
                pool.host_free -= held
                self._joining.moved_blocks[sequence.rank] += held
                sequence.swapped_blocks = held
                sequence.loaded = True
                if self.tables is not None:
                    self.tables.swap_out(sequence)
        self._holdings.release(sequence, held)
        if not sequence.loaded:
            sequence.standing_computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self._line.join(sequence)

    def _blocks(self, sequence: Sequence) -> int:
        """Blocks that a running sequence holds, with those that it shares."""
        all_taken = sequence.clock is None or self._grown
        return self._holdings.of(sequence, sequence.tokens if all_taken else sequence.computed)

    def _tokens_ahead(self, sequence: Sequence) -> int:
        begun = sum(other.left_to_compute for other in self.prompts.values())
        return begun + self._line.tokens_ahead(sequence)
