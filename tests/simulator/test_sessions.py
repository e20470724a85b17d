"""Conversations grow turn by turn, share what they share, and wait for their answers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.scenario.workload import Workload
from membound.simulator.scheduling.blocks import BlockPool
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.loop import serve
from membound.simulator.scheduling.policies import ContinuousBatching
from membound.simulator.scheduling.prefix import PrefixChain, blocks_of
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Outcome, Request, Sequence, Step
from membound.simulator.scheduling.scheduler import Scheduler
from membound.simulator.scheduling.workload import request_stream

SESSIONS = {
    "kind": "sessions",
    "tokens": {"kind": "uniform", "low": 5, "high": 60},
    "turns": {"kind": "geometric", "mean": 3},
    "think": {"kind": "exponential", "mean_s": 4.0},
    "system_tokens": 100,
    "groups": 3,
    "popularity": 1.0,
}
POISSON = {"kind": "poisson", "rate_rps": 2.0}


def workload(**changes) -> Workload:
    document = {
        "arrivals": POISSON,
        "requests": 200,
        "prompts": SESSIONS | changes.pop("prompts", {}),
        "output_tokens": {"kind": "uniform", "low": 2, "high": 30},
        "seed": 3,
    }
    return Workload.model_validate(document | changes)


class StepOf:
    """Every step takes the same time and every sequence emits one token."""

    def __init__(self, time_s: float) -> None:
        self.time_s = time_s

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        return Outcome(self.time_s, {work.sequence: (7,) for work in step.work})


class HandClock:
    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


def serve_all(workload: Workload, max_tokens: int = 10**6, seats: int = 64, vocab: int | None = None) -> Recorder:
    pool = BlockPool(10_000, 16)
    scheduler = Scheduler(ContinuousBatching(), pool, seats, max_tokens)
    recorder, clock = Recorder(), HandClock()
    client = client_for(workload.arrivals, request_stream(workload, vocab))
    for until_s in serve(scheduler, client, StepOf(0.01), clock, recorder):
        clock.time_s = max(clock.time_s, until_s)
    assert pool.used == 0
    return recorder


def conversations(workload: Workload) -> list[list[Request]]:
    return [list(first.turns()) for first in request_stream(workload)]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32), requests=st.integers(1, 120), system=st.integers(0, 200), limit=st.none() | st.just(500)
)
def test_turns_are_counted_and_each_prompt_is_the_history_and_a_question(seed, requests, system, limit):
    prompts = {"system_tokens": system, "groups": 1, "popularity": 0.0, "context_limit": limit}
    talks = conversations(workload(seed=seed, requests=requests, prompts=prompts))
    turns = list(itertools.chain(*talks))
    assert [turn.id for turn in turns] == list(range(requests))
    for talk in talks:
        assert 5 <= talk[0].prompt_tokens - system <= 60 and talk[0].think_s == 0
        for before, after in itertools.pairwise(talk):
            assert 5 <= after.prompt_tokens - before.tokens <= 60
        assert all(turn.prefix.tokens == turn.tokens <= (limit or turn.tokens) for turn in talk)


def test_turns_and_groups_follow_their_distributions():
    talks = conversations(workload(requests=30_000))
    assert np.mean([len(talk) for talk in talks]) == pytest.approx(3, rel=0.05)
    groups = np.bincount([talk[0].prefix.ids[0] for talk in talks]) / len(talks)
    zipf = 1 / np.arange(1, 4)
    np.testing.assert_allclose(groups, zipf / zipf.sum(), atol=0.02)
    thinks = [turn.think_s for talk in talks for turn in talk[1:]]
    assert np.mean(thinks) == pytest.approx(4.0, rel=0.03)


def shared(first: PrefixChain, second: PrefixChain, block_size: int) -> int:
    blocks = zip(blocks_of(first.spans(block_size)), blocks_of(second.spans(block_size)), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], blocks))


@pytest.mark.parametrize("block_size", [1, 7, 16, 512])
def test_blocks_are_shared_exactly_as_far_as_the_tokens_are(block_size):
    talks = conversations(workload(requests=400))
    for talk in talks:
        for before, after in itertools.pairwise(talk):
            assert shared(before.prefix, after.prefix, block_size) == before.tokens // block_size
    for one, other in itertools.pairwise(talks):
        same_group = one[0].prefix.ids[0] == other[0].prefix.ids[0]
        assert shared(one[0].prefix, other[0].prefix, block_size) == (100 // block_size if same_group else 0)


@given(
    segments=st.lists(
        st.tuples(st.integers(0, 2**62), st.integers(1, 60)), min_size=1, max_size=8, unique_by=lambda s: s[0]
    ),
    cut=st.integers(0, 7),
    block_size=st.integers(1, 40),
)
def test_the_name_of_a_block_stands_for_all_tokens_up_to_its_block(segments, cut, block_size):
    """Two chains with a common beginning share its full blocks and, since all later ids differ, nothing else."""
    ids = tuple(segment[0] for segment in segments)
    ends = tuple(itertools.accumulate(segment[1] for segment in segments))
    common = min(cut, len(ids))
    other = PrefixChain((*ids[:common], *(id + 2**62 + 1 for id in ids[common:])), ends)
    chain = PrefixChain(ids, ends)
    until = ends[common - 1] if common else 0
    assert shared(chain, other, block_size) == until // block_size
    blocks = blocks_of(chain.spans(block_size))
    assert len(set(blocks) & set(blocks_of(other.spans(block_size)))) == until // block_size
    assert [index for _, index in blocks] == list(range(ends[-1] // block_size))
    assert blocks_of(chain.spans(block_size, until)) == blocks[: until // block_size]
    assert blocks_of(chain.spans(block_size, None, cut)) == blocks[cut:]
    assert all(id == ids[np.searchsorted(ends, (index + 1) * block_size - 1, side="right")] for id, index in blocks)


@pytest.mark.parametrize("arrivals", [POISSON, {"kind": "closed_loop", "concurrency": 4, "think": SESSIONS["think"]}])
def test_a_turn_arrives_its_thinking_time_after_the_answer_before(arrivals):
    work = workload(arrivals=arrivals)
    table = serve_all(work).requests()
    assert table["completed"].all() and len(table["id"]) == 200
    for talk in conversations(work):
        for before, after in itertools.pairwise(talk):
            assert table["arrival_s"][after.id] == table["finished_s"][before.id] + after.think_s
        if arrivals is POISSON:
            assert table["arrival_s"][talk[0].id] == talk[0].arrival_s


def test_a_closed_loop_never_has_more_in_service_than_users():
    table = serve_all(workload(arrivals={"kind": "closed_loop", "concurrency": 3})).requests()
    times = np.sort(np.concatenate((table["arrival_s"], table["finished_s"])))
    inside = [np.sum((table["arrival_s"] <= t) & (t < table["finished_s"])) for t in times]
    assert max(inside) == 3


def test_a_closed_loop_with_thinking_obeys_the_interactive_response_time_law():
    """Throughput = users / (response time + thinking time): Denning and Buzen, Computing Surveys 10 (1978)."""
    arrivals = {"kind": "closed_loop", "concurrency": 20, "think": {"kind": "exponential", "mean_s": 2.0}}
    prompts = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 10}}
    document = {"arrivals": arrivals, "prompts": prompts, "output_tokens": {"kind": "fixed", "tokens": 50}}
    table = serve_all(Workload.model_validate(document | {"requests": 4000}), seats=8).requests()
    response_s = np.mean(table["finished_s"] - table["arrival_s"])
    throughput = 4000 / table["finished_s"].max()
    assert throughput == pytest.approx(20 / (response_s + 2.0), rel=0.03)
    assert len(np.unique(table["arrival_s"])) > 3900, "users who think do not arrive together"


def test_a_refused_turn_ends_its_conversation_and_a_user_goes_on_with_the_next():
    prompts = {"turns": {"kind": "fixed", "count": 5}}
    for arrivals in (POISSON, {"kind": "closed_loop", "concurrency": 2}):
        table = serve_all(workload(arrivals=arrivals, prompts=prompts), max_tokens=250).requests()
        refused = ~table["completed"]
        assert refused.any() and table["completed"].any()
        assert set(table["id"] // 5) == set(range(40)), "every conversation was begun"
        followed = np.isin(table["id"][refused] + 1, table["id"])
        assert np.all((table["id"][refused] + 1)[followed] % 5 == 0), "nothing follows a refused turn"


def test_with_tokens_the_history_is_what_was_answered():
    recorder = serve_all(workload(requests=60), vocab=1000)
    prompts = {turn.id: turn for first in request_stream(workload(requests=60), 1000) for turn in first.turns()}
    assert {len(prompts[i].prompt_ids) for i in prompts} == {turn.prompt_tokens for turn in prompts.values()}
    systems = {turn.prefix.ids[0]: turn.prompt_ids[:100] for turn in prompts.values()}
    assert all(turn.prompt_ids[:100] == systems[turn.prefix.ids[0]] for turn in prompts.values())
    assert len(set(systems.values())) == len(systems) > 1
    assert all(set(outputs) == {7} for outputs in recorder.outputs.values())


def test_the_answer_stands_in_the_next_prompt():
    """The stand-in for an unknown answer is replaced by what the model wrote, here sevens."""
    work = workload(requests=40)
    client = client_for(work.arrivals, request_stream(work, vocab=6))
    first = next(request for request in client.due(1e9) if request.follow_up is not None)
    sequence = Sequence.of(first)
    sequence.token_ids += [7] * first.output_tokens
    client.ended(sequence, 1e9)
    (second,) = client.due(1e9 + first.follow_up.think_s)
    assert second.prompt_ids[: first.prompt_tokens] == first.prompt_ids
    assert second.prompt_ids[first.prompt_tokens : first.tokens] == (7,) * first.output_tokens
    assert len(second.prompt_ids) == second.prompt_tokens and 7 not in second.prompt_ids[first.tokens :]


def test_a_context_limit_that_no_turn_meets_is_one_sentence():
    with pytest.raises(MemboundError, match=r"context_limit' is 90, which the first turn of 1000 conversations"):
        list(request_stream(workload(prompts={"context_limit": 90})))
