"""The scheduler conserves requests and blocks and decides as its policy says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.techniques import NgramDrafts
from membound.simulator.scheduling.blocks import BlockPool, BlockTables, OutOfBlocks
from membound.simulator.scheduling.drafter import Room, prompt_lookup
from membound.simulator.scheduling.guessing import ModelledDrafter
from membound.simulator.scheduling.policies import (
    BATCHINGS,
    ChunkedPrefill,
    ContinuousBatching,
    EarliestDeadline,
    FirstCome,
    LeastSlack,
    PriorityWithAgeing,
    StaticBatching,
)
from membound.simulator.scheduling.prefix import PrefixChain
from membound.simulator.scheduling.prefix_cache import PrefixCache
from membound.simulator.scheduling.request import Draft, Outcome, Request, Sequence, Step
from membound.simulator.scheduling.scheduler import Scheduler

REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=25)


class FixedDrafter:
    """Always proposes as much as it may, up to `gamma`."""

    computed_guesses = 0

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        return [Draft((7,) * max(0, min(self.gamma, room.chain))) for room in rooms]


def serve_all(scheduler: Scheduler, requests: list[Request], accept: int = 0) -> tuple[list[Step], list[Sequence]]:
    """Runs to the end, every step accepting up to `accept` drafts; checks integrity after each step."""
    for request in requests:
        scheduler.add(request)
    steps, ended = [], []
    while (step := scheduler.plan()) is not None:
        scheduler.check_integrity()
        emitted = {w.sequence: (7,) * (1 + min(accept, len(w.drafts))) for w in step.work if w.emits}
        ended += scheduler.commit(step, Outcome(1.0, emitted))
        scheduler.check_integrity()
        steps.append(step)
        assert len(steps) < 10_000
    return steps, ended


def requests_of(lengths: list[tuple[int, int]]) -> list[Request]:
    """Requests that share their beginnings in pairs, so that a prefix cache has something to find."""
    return [
        Request(
            i, 0.1 * i, prompt, output, prefix=PrefixChain((i // 2 % 5, 100 + i), (min(prompt, 11), prompt + output))
        )
        for i, (prompt, output) in enumerate(lengths)
    ]


ENGINES = st.fixed_dictionaries(
    {
        "batching": st.sampled_from(list(BATCHINGS.values())),
        "order": st.sampled_from([FirstCome(), PriorityWithAgeing(0.5), EarliestDeadline(), LeastSlack(0.01)]),
        "memory": st.sampled_from(
            ["paged", "swap", "reserved", "pow2", "oracle", "buddy", "prefix cache", "prefix cache on host"]
        ),
        "blocks": st.integers(16, 60),
        "fixed": st.integers(0, 1),
        "seats": st.integers(1, 8),
        "ranks": st.sampled_from([1, 1, 2, 3]),
    }
)


def scheduler_of(engine: dict, drafter: FixedDrafter | None = None, **kwargs) -> Scheduler:
    memory = engine["memory"]

    def pool_of_rank() -> BlockPool:
        cache = PrefixCache(8 if memory.endswith("host") else 0) if memory.startswith("prefix") else None
        return BlockPool(engine["blocks"] + 8, 4, cache, 12 if memory == "swap" else 0, engine["fixed"])

    pool, *others = (pool_of_rank() for _ in range(engine["ranks"]))

    def classify(sequence: Sequence) -> None:
        sequence.priority = sequence.id % 3
        sequence.deadline_s = sequence.request.arrival_s + (1.0, 5.0, 2.0)[sequence.id % 3]

    return Scheduler(
        engine["batching"],
        pool,
        engine["seats"],
        64,
        drafter,
        others=tuple(others),
        order=engine["order"],
        classify=classify,
        swap=memory == "swap",
        reserved_tokens={"reserved": 60, "pow2": "pow2", "oracle": "oracle", "buddy": "oracle"}.get(memory),
        chunks=memory == "buddy",
        **kwargs,
    )


@settings(deadline=None, max_examples=150)
@given(lengths=REQUESTS, engine=ENGINES, gamma=st.integers(0, 4), accept=st.integers(0, 4), numbered=st.booleans())
def test_every_request_ends_and_every_block_comes_back(lengths, engine, gamma, accept, numbered):
    numbered = numbered and not engine["memory"].startswith("prefix") and not engine["fixed"] and engine["ranks"] == 1
    tables = BlockTables(engine["blocks"] + 8, 4) if numbered else None
    scheduler = scheduler_of(engine, FixedDrafter(gamma) if gamma else None, tables=tables)
    steps, ended = serve_all(scheduler, requests_of(lengths), accept)
    assert sorted(sequence.id for sequence in ended) == list(range(len(lengths)))
    assert all(sequence.emitted == sequence.request.output_tokens for sequence in ended)
    assert not scheduler.has_work
    for pool in scheduler.pools:
        assert pool.used == (pool.cache.unused if pool.cache else 0)
        assert pool.host_free == (12 if engine["memory"] == "swap" else 0)
    for step in steps:
        assert len(step.work) == step.sequences <= engine["seats"]
        assert sum(work.tokens for work in step.work) <= 64 * engine["ranks"]
        assert all(work.tokens <= 64 for work in step.work)
        assert step.blocks_used <= step.num_blocks
    if not any(step.preempted for step in steps):
        computed = sum(work.tokens for step in steps for work in step.prompts)
        found = sum(step.cached_tokens for step in steps)
        assert computed + found == sum(prompt for prompt, _ in lengths)


@settings(deadline=None, max_examples=50)
@given(lengths=REQUESTS, micro_batches=st.integers(1, 5), chunked=st.booleans())
def test_parts_of_prompts_in_a_round_are_those_of_its_micro_batches(lengths, micro_batches, chunked):
    """Each has the engine's budget, and no prompt is in two of them: greedily laid, they find room."""
    batching = ChunkedPrefill() if chunked else ContinuousBatching()
    scheduler = Scheduler(batching, BlockPool(400, 4), 8, 64, micro_batches=micro_batches)
    steps, ended = serve_all(scheduler, requests_of(lengths), 0)
    assert len(ended) == len(lengths)
    for step in steps:
        rooms = [64 - (step.decoding + part) // micro_batches for part in range(micro_batches)]
        for work in step.prompts:
            room = max(rooms)
            assert 0 < work.tokens <= room
            rooms[rooms.index(room)] -= work.tokens
    assert steps[0].filling


def expanded(steps: list[tuple[Step, int]]) -> list[tuple]:
    """Equal steps one by one: who is in, who came and went, and what they attend to."""
    listed = []
    for step, times in steps:
        for i in range(times):
            new = (step.admitted, step.resumed, step.preempted, step.moved_blocks) if i == 0 else ((), (), (), 0)
            listed.append((step.decoding, step.kv_tokens + i * step.decoding, step.prompts, *new))
    return listed


@settings(deadline=None, max_examples=100)
@given(lengths=REQUESTS, engine=ENGINES, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_equal_steps_planned_as_one_are_those_that_are_planned_one_by_one(lengths, engine, cuts):
    """However many of the equal steps are taken at a time, and whether each sequence's work is listed or counted."""
    ran = []
    for itemized, most in ((True, [1]), (False, [1]), (False, cuts), (False, [10**6])):
        scheduler = scheduler_of(engine, itemized=itemized)
        for request in requests_of(lengths):
            scheduler.add(request)
        steps, ended, usage = [], [], 0.0
        while (step := scheduler.plan()) is not None:
            count = min(step.steady, most[len(steps) % len(most)])
            emitted = {work.sequence: (7,) for work in step.work if work.emits} if itemized else None
            outcome = Outcome(count * 1.0 + 0.25 * count * (count - 1) / 2, emitted, count, 0.25)
            usage += scheduler.usage(step, Outcome(float(count), None, count))[0]
            ended += [sequence.id for sequence in scheduler.commit(step, outcome)]
            scheduler.check_integrity()
            steps.append((step, count))
        ran.append((expanded(steps), ended, pytest.approx(usage)))
    assert ran[0] == ran[1] == ran[2] == ran[3]


class Listed:
    """Lists as drafts what a modelled drafter counts."""

    computed_guesses = 0

    def __init__(self, modelled: ModelledDrafter) -> None:
        self.modelled = modelled

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        gamma = self.modelled.drafts.gamma
        finds = [self.modelled.finds(sequence, sequence.tokens) for sequence in sequences]
        return [Draft((7,) * max(0, found * min(gamma, r.chain))) for found, r in zip(finds, rooms, strict=True)]


@settings(deadline=None, max_examples=100)
@given(lengths=REQUESTS, engine=ENGINES, gamma=st.integers(1, 5), hit_rate=st.sampled_from([0.3, 0.7, 1.0]))
def test_guesses_that_are_counted_are_those_that_are_listed(lengths, engine, gamma, hit_rate):
    """The same decisions, sums, blocks and ends, whether each guess is a token of a list or one of a number."""

    def right(sequence: Sequence, guesses: int) -> int:
        return (7 * sequence.id + 3 * sequence.emitted) % (guesses + 1)

    ran = []
    for counted in (False, True):
        drafts = NgramDrafts(gamma=gamma, alpha=0.5, hit_rate=hit_rate, max_ngram=2, min_ngram=1)
        modelled = ModelledDrafter(drafts, seed=3)
        scheduler = scheduler_of(engine, modelled if counted else Listed(modelled), itemized=not counted)
        for request in requests_of(lengths):
            scheduler.add(request)
        steps, ended = [], []
        while (step := scheduler.plan()) is not None:
            if counted:
                outcome = Outcome(1.0, accepted=tuple(right(sequence, count) for sequence, count in step.guesses))
            else:
                running = {sequence.id: sequence for sequence in scheduler.running}
                emitted = {
                    work.sequence: (7,) * (1 + right(running[work.sequence], len(work.drafts)))
                    for work in step.work
                    if work.emits
                }
                outcome = Outcome(1.0, emitted)
            usage = scheduler.usage(step, outcome)
            ended += [(len(steps), sequence.id) for sequence in scheduler.commit(step, outcome)]
            scheduler.check_integrity()
            steps.append((step._replace(work=(), guesses=()), step.drafted, usage))
        ran.append((steps, ended))
    assert ran[0] == ran[1]


def test_static_batching_admits_nobody_until_the_batch_has_drained():
    scheduler = Scheduler(StaticBatching(), BlockPool(100, 4), 2, 64)
    requests = [Request(0, 0.0, 4, 2), Request(1, 0.0, 4, 5), Request(2, 0.0, 4, 2)]
    steps, _ = serve_all(scheduler, requests)
    assert [step.admitted for step in steps if step.admitted] == [(0, 1), (2,)]
    assert steps[5].admitted == (2,), "request 2 waits for the five steps of request 1"


def test_continuous_batching_fills_a_seat_in_the_step_after_it_was_left():
    scheduler = Scheduler(ContinuousBatching(), BlockPool(100, 4), 2, 64)
    requests = [Request(0, 0.0, 4, 2), Request(1, 0.0, 4, 5), Request(2, 0.0, 4, 2)]
    steps, _ = serve_all(scheduler, requests)
    assert steps[2].admitted == (2,)
    assert len(steps) == 5


def test_preemption_takes_the_latest_and_recomputes_all_its_tokens():
    scheduler = Scheduler(ContinuousBatching(), BlockPool(4, block_size=4), 4, 64)
    requests = [Request(0, 0.0, 8, 8), Request(1, 0.0, 8, 8)]
    steps, ended = serve_all(scheduler, requests)
    preempted = [step for step in steps if step.preempted]
    assert preempted[0].preempted == (1,)
    again = next(step for step in steps[1:] if step.admitted == (1,))
    assert again.work[-1].start == 0 and again.work[-1].tokens > 8
    assert {sequence.id: sequence.preemptions for sequence in ended} == {0: 0, 1: 1}


def test_a_request_that_can_never_fit_is_rejected_and_not_queued():
    scheduler = Scheduler(ContinuousBatching(), BlockPool(4, block_size=4), 4, 64)
    assert scheduler.add(Request(0, 0.0, 10, 7)).status == "rejected"
    assert "4 KV blocks of 4" in scheduler.refusal(Request(0, 0.0, 10, 7))
    assert not scheduler.has_work


@given(lengths=REQUESTS, gamma=st.integers(1, 8), accept=st.integers(0, 8))
def test_drafts_never_cost_another_sequence_its_blocks(lengths, gamma, accept):
    """With blocks for all requests at their longest nobody is preempted, however many drafts are rejected."""
    requests = [Request(i, 0.0, prompt, output) for i, (prompt, output) in enumerate(lengths)]
    blocks = sum(-(-(request.prompt_tokens + request.output_tokens) // 4) for request in requests)
    scheduler = Scheduler(ContinuousBatching(), BlockPool(blocks, 4), len(requests), 2000, FixedDrafter(gamma))
    _, ended = serve_all(scheduler, requests, accept)
    assert all(sequence.preemptions == 0 for sequence in ended)


def test_taking_more_than_there_is_raises_and_changes_nothing():
    pool = BlockPool(2, 4)
    with pytest.raises(OutOfBlocks):
        pool.take(3)
    assert pool.used == 0


def test_prompt_lookup_continues_the_latest_match_of_the_longest_suffix():
    assert prompt_lookup([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 3, 2, 3) == (4, 8, 1)
    assert prompt_lookup([1, 2, 3, 1, 2, 3, 1, 2, 3], 3, 2, 2) == (1, 2)
    assert prompt_lookup([1, 2, 3, 4], 3, 2, 4) == ()
    assert prompt_lookup([5], 3, 2, 4) == ()


@given(tokens=st.lists(st.integers(0, 3), max_size=40), limit=st.integers(-1, 6))
def test_a_draft_is_what_stood_behind_an_equal_suffix(tokens, limit):
    draft = prompt_lookup(tokens, 3, 2, limit)
    assert len(draft) <= max(limit, 0)
    if draft:
        found = [
            (size, start)
            for size in (3, 2)
            for start in range(len(tokens) - size)
            if tokens[start : start + size] == tokens[-size:]
            and tuple(tokens[start + size : start + size + limit]) == draft
        ]
        assert found
