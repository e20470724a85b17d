"""What does the engine compute next?

The scheduler is shared by the simulator and the runtime. It is pure: given the same requests, outcomes and block
pool it makes the same decisions, whatever the clock that it never sees.
"""

from __future__ import annotations

from collections import deque

from membound.simulator.scheduling.blocks import BlockPool
from membound.simulator.scheduling.drafter import Drafter
from membound.simulator.scheduling.policy import Policy
from membound.simulator.scheduling.request import Outcome, Request, Sequence, Step, Work


class Scheduler:
    """Holds the queue and the batch: `add` requests, `plan` a step, `commit` what came of it.

    Running sequences come first, each with its uncomputed token and its drafts; then waiting ones join with their
    whole prompt, first come first served, while `max_num_seqs`, `max_batched_tokens` and free blocks allow and the
    policy agrees. When a running sequence finds no block, the latest to join is preempted and recomputed later.
    """

    def __init__(
        self,
        policy: Policy,
        pool: BlockPool,
        max_num_seqs: int,
        max_batched_tokens: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.policy = policy
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.drafter = drafter
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def refusal(self, request: Request) -> str | None:
        """Why the engine can never serve `request`, or None."""
        total = request.prompt_tokens + request.output_tokens
        if self.pool.blocks_for(total) > self.pool.num_blocks:
            return f"{total} tokens do not fit into {self.pool.num_blocks} KV blocks of {self.pool.block_size}"
        if total > self.max_batched_tokens:
            return f"{total} tokens exceed max_batched_tokens ({self.max_batched_tokens})"
        return None

    def add(self, request: Request) -> Sequence:
        """Queues a request; one that can never be served is returned as rejected and not queued."""
        sequence = Sequence.of(request)
        if self.refusal(request) is None:
            self.waiting.append(sequence)
        else:
            sequence.status = "rejected"
        return sequence

    def plan(self) -> Step | None:
        """The next step, or None when nothing can be computed. Blocks for all its tokens are allocated."""
        running_before = len(self.running)
        preempted: list[int] = []
        work = self._continue_running(preempted)
        admitted = [] if preempted else self._admit(work, running_before)
        if not work:
            return None
        return Step(tuple(work), tuple(admitted), tuple(preempted), self.pool.used, self.pool.num_blocks)

    def commit(self, step: Step, outcome: Outcome) -> list[Sequence]:
        """Applies the emitted tokens and returns the sequences that ended, their blocks released."""
        by_id = {sequence.id: sequence for sequence in self.running}
        ended = []
        for work in step.work:
            sequence = by_id[work.sequence]
            emitted = outcome.emitted[sequence.id][: sequence.remaining]
            # Every emitted token but the newest was an accepted draft, so its K and V are already in place.
            sequence.tokens += len(emitted)
            sequence.computed = sequence.tokens - 1
            self.pool.shrink(sequence, sequence.tokens)
            if sequence.token_ids is not None:
                sequence.token_ids.extend(emitted)
            if sequence.finished:
                sequence.status = "completed"
                self.pool.release(sequence)
                ended.append(sequence)
        if ended:
            self.running = [sequence for sequence in self.running if sequence.status == "running"]
        return ended

    def check_integrity(self) -> None:
        """Asserts that no block is lost or shared and that no sequence is in two places."""
        self.pool.check_integrity([*self.running, *self.waiting])
        ids = [sequence.id for sequence in [*self.running, *self.waiting]]
        assert len(ids) == len(set(ids)), "a sequence is in two places"

    def _continue_running(self, preempted: list[int]) -> list[Work]:
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self.pool.can_grow(sequence, sequence.tokens):
                self.pool.grow(sequence, sequence.tokens)
                index += 1
            else:
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim.id)
        # Drafts come second: they use what every sequence's own token has left of tokens and blocks.
        spare = self.max_batched_tokens - len(self.running)
        work = []
        for sequence in self.running:
            drafts = self._drafts(sequence, spare)
            self.pool.grow(sequence, sequence.tokens + len(drafts))
            work.append(Work(sequence.id, sequence.computed, sequence.tokens - sequence.computed + len(drafts), drafts))
            spare -= len(drafts)
        return work

    def _drafts(self, sequence: Sequence, spare: int) -> tuple[int, ...]:
        if self.drafter is None:
            return ()
        # The step emits one token beyond the accepted drafts, so the last token is never worth a draft.
        drafts = self.drafter.draft(sequence, min(spare, sequence.remaining - 1))
        return drafts if self.pool.can_grow(sequence, sequence.tokens + len(drafts)) else ()

    def _admit(self, work: list[Work], running_before: int) -> list[int]:
        admitted: list[int] = []
        budget = self.max_batched_tokens - sum(item.tokens for item in work)
        while self.waiting and len(self.running) < self.max_num_seqs and self.policy.may_admit(running_before):
            sequence = self.waiting[0]
            if sequence.tokens > budget or not self.pool.can_grow(sequence, sequence.tokens):
                break
            self.waiting.popleft()
            self.pool.grow(sequence, sequence.tokens)
            sequence.status = "running"
            self.running.append(sequence)
            work.append(Work(sequence.id, 0, sequence.tokens))
            admitted.append(sequence.id)
            budget -= sequence.tokens
        return admitted

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.release(sequence)
        sequence.status = "waiting"
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
