"""How do the turns of conversations follow each other, and what do they share?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.scenario.workload import FixedTurns, Length, SessionPrompts
from membound.simulator.scheduling.prefix import PrefixChain
from membound.simulator.scheduling.request import Request
from membound.simulator.scheduling.workload.arrivals import duration_chunks
from membound.simulator.scheduling.workload.lengths import pair_chunks
from membound.simulator.scheduling.workload.streams import CHUNK, stream

# Ids of what conversations hold leave room below for those of the system prompts.
SEGMENTS_OF_A_SESSION = 2**16
FIRST_SESSION = 2**20


def first_turns(
    sessions: SessionPrompts, output: Length, rank_correlation: float, seed: int, count: int
) -> Iterator[Request]:
    """The first turns of conversations with `count` turns together; the others follow as their `follow_up`.

    They arrive at time 0: whoever knows the arrivals sets them.
    """
    pairs = _each(pair_chunks(sessions.tokens, output, rank_correlation, stream(seed, "lengths")))
    thinks = _each((chunk,) for chunk in duration_chunks(sessions.think, stream(seed, "turn thinks")))
    shapes = _each(_shapes(sessions, stream(seed, "sessions")))
    first_id = without_turn = 0
    for number, (group, turns) in enumerate(shapes):
        turns = min(turns, count - first_id)
        lengths = [next(pairs) for _ in range(turns)]
        thinks_s = [0.0, *(next(thinks)[0] for _ in range(turns - 1))]
        said = _conversation(sessions, number, group, lengths)
        request: Request | None = None
        for k in reversed(range(len(said))):
            prompt_tokens, output_tokens, prefix = said[k]
            request = Request(
                first_id + k, 0.0, prompt_tokens, output_tokens, prefix=prefix, think_s=thinks_s[k], follow_up=request
            )
        if request is not None:
            yield request
        first_id += len(said)
        if first_id >= count:
            return
        without_turn = 0 if said else without_turn + 1
        if without_turn == 1000:
            raise MemboundError(
                f"field 'workload.prompts.context_limit' is {sessions.context_limit}, which the first turn of 1000 "
                "conversations in a row exceeded; make it larger or the lengths shorter"
            )


def _conversation(
    sessions: SessionPrompts, number: int, group: int, lengths: list[tuple[int, int]]
) -> list[tuple[int, int, PrefixChain]]:
    """Prompt tokens, output tokens and identity of each turn, up to the one that would exceed the context limit.

    The identity grows by turn: system prompt, question, answer, question, ...
    """
    ids: tuple[int, ...] = (group,) if sessions.system_tokens else ()
    ends: tuple[int, ...] = (sessions.system_tokens,) if sessions.system_tokens else ()
    next_id, total = FIRST_SESSION + number * SEGMENTS_OF_A_SESSION, sessions.system_tokens
    said = []
    for new_tokens, output_tokens in lengths:
        prompt_tokens = total + new_tokens
        total = prompt_tokens + output_tokens
        if sessions.context_limit is not None and total > sessions.context_limit:
            break
        ids, ends = (*ids, next_id, next_id + 1), (*ends, prompt_tokens, total)
        next_id += 2
        said.append((prompt_tokens, output_tokens, PrefixChain(ids, ends)))
    return said


def _shapes(sessions: SessionPrompts, rng: np.random.Generator) -> Iterator[tuple[NDArray[np.int64], ...]]:
    """Endless chunks of (group, turns)."""
    weights = np.arange(1, sessions.groups + 1, dtype=np.float64) ** -sessions.popularity
    reached = np.cumsum(weights) / weights.sum()
    turns = sessions.turns
    while True:
        groups = np.minimum(np.searchsorted(reached, rng.random(CHUNK), side="right"), sessions.groups - 1)
        if isinstance(turns, FixedTurns):
            yield groups, np.full(CHUNK, turns.count)
        else:
            yield groups, np.minimum(rng.geometric(1 / turns.mean, CHUNK), turns.most)


def _each(chunks: Iterator[tuple[NDArray, ...]]) -> Iterator[tuple]:
    """The rows of chunks of columns, as plain numbers."""
    for columns in chunks:
        yield from zip(*(column.tolist() for column in columns), strict=True)
