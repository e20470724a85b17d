"""Which requests does a scenario's workload consist of? The same ones for the simulator and the runtime."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, islice

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.tasks import resolve
from membound.roofline.scenario.workload import (
    ClosedLoop,
    SessionPrompts,
    SyntheticPrompts,
    TextPrompts,
    TraceArrivals,
    TracePrompts,
    Workload,
)
from membound.simulator.scheduling.prefix import PrefixChain
from membound.simulator.scheduling.request import Request
from membound.simulator.scheduling.workload.arrivals import arrival_chunks, duration_chunks
from membound.simulator.scheduling.workload.lengths import LengthSampler, pair_chunks
from membound.simulator.scheduling.workload.prompts import load_prompts
from membound.simulator.scheduling.workload.sessions import first_turns
from membound.simulator.scheduling.workload.streams import CHUNK, Column, stream
from membound.simulator.scheduling.workload.traces import TraceRow, read_trace, window_rows


@dataclass(frozen=True)
class RequestColumns:
    """A chunk of single requests as columns, with ids from `first_id` on: the fast way to read a large workload."""

    first_id: int
    arrival_s: NDArray[np.float64]
    think_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prefixes: tuple[PrefixChain | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def requests(self) -> Iterator[Request]:
        columns = (self.arrival_s, self.prompt_tokens, self.output_tokens, self.think_s)
        rows = zip(*(column.tolist() for column in columns), self.prefixes or (None,) * len(self), strict=True)
        for i, (arrival_s, prompt, output, think_s, prefix) in enumerate(rows, start=self.first_id):
            yield Request(i, arrival_s, prompt, output, prefix=prefix, think_s=think_s)


def requests_for(scenario: Scenario, vocab: int | None = None) -> list[Request]:
    """All requests of `request_stream` in a list."""
    return list(request_stream(scenario.workload, vocab))


def request_stream(workload: Workload, vocab: int | None = None) -> Iterator[Request]:
    """The workload's requests in order of arrival, drawn from its seed; conversations as their first turns.

    Memory does not grow with their number. Text prompts come with their recorded content. Others have no content for
    the simulator; for the runtime, which passes `vocab`, their token ids are drawn uniformly from it, equal where
    their prefixes are. Raises MemboundError where a request asks for more tokens than its recording holds, and where
    a trace is wrong.
    """
    workload = resolve(workload)
    match workload.prompts:
        case TextPrompts(file=file):
            return _text_requests(workload, file)
        case SessionPrompts():
            requests = _session_requests(workload, workload.prompts)
        case _:
            requests = chain.from_iterable(columns.requests() for columns in request_columns(workload))
    return requests if vocab is None else (_with_tokens(request, vocab, workload.seed) for request in requests)


def request_columns(workload: Workload) -> Iterator[RequestColumns]:
    """Single requests (synthetic or of a trace) in order of arrival, in chunks of columns.

    Conversations and recorded text are not independent rows: `request_stream` has those.
    """
    workload = resolve(workload)
    times, thinks = _times(workload), _thinks(workload)
    first_id, left = 0, sys.maxsize if workload.requests is None else workload.requests
    for lengths in _lengths(workload):
        size = min(left, len(lengths.prompt_tokens))
        arrival_s = lengths.time_s[:size] / _trace_of(workload).speed if workload.rows_of_trace else times.take(size)
        size = len(arrival_s)
        if size:
            yield RequestColumns(
                first_id,
                arrival_s,
                thinks.take(size),
                lengths.prompt_tokens[:size],
                lengths.output_tokens[:size],
                None if lengths.prefixes is None else lengths.prefixes[:size],
            )
        first_id, left = first_id + size, left - size
        if not left or not size:
            return


def longest_request(workload: Workload, most: int) -> int:
    """Tokens of the longest request or turn, prompt and output, that has at most `most`; these where none has.

    The workload is drawn once for it.
    """
    if isinstance(resolve(workload).prompts, TextPrompts | SessionPrompts):
        totals: Iterator[int] = (turn.tokens for first in request_stream(workload) for turn in first.turns())
        return max((total for total in totals if total <= most), default=most)
    columns = (chunk.prompt_tokens + chunk.output_tokens for chunk in request_columns(workload))
    return max((int(total[total <= most].max(initial=0)) for total in columns), default=0) or most


@dataclass(frozen=True)
class _Lengths:
    """A chunk of lengths; times and prefixes are those of a trace's rows."""

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    time_s: NDArray[np.float64]
    prefixes: tuple[PrefixChain | None, ...] | None = None


def _lengths(workload: Workload) -> Iterator[_Lengths]:
    rng, output = stream(workload.seed, "lengths"), workload.output_tokens
    match workload.prompts:
        case SyntheticPrompts(tokens=tokens):
            assert output is not None, "a workload without a trace has output lengths"
            for pair in pair_chunks(tokens, output, workload.rank_correlation or 0.0, rng):
                yield _Lengths(*pair, np.zeros(CHUNK))
        case TracePrompts() | None:
            sampler = None if output is None else LengthSampler(output)
            for rows in _row_chunks(workload):
                prompts, outputs = (np.array([row[i] for row in rows], dtype=np.int64) for i in (1, 2))
                outputs = outputs if sampler is None else sampler.draw(len(rows), rng)
                prefixes = tuple(row.prefix for row in rows) if rows[0].prefix else None
                yield _Lengths(prompts, outputs, np.array([row.time_s for row in rows]), prefixes)
        case _:
            raise AssertionError("conversations and recorded text are not columns")


def _row_chunks(workload: Workload) -> Iterator[list[TraceRow]]:
    """Rows of the trace that says the lengths: once with its own times, else again and again."""
    prompts = workload.prompts
    rows = (
        chain.from_iterable(read_trace(prompts) for _ in count())
        if isinstance(prompts, TracePrompts)
        else window_rows(_trace_of(workload), sys.maxsize if workload.requests is None else workload.requests)
    )
    while chunk := list(islice(rows, CHUNK)):
        yield chunk


def _trace_of(workload: Workload) -> TraceArrivals:
    assert isinstance(workload.arrivals, TraceArrivals), "without prompts the arrivals are a trace"
    return workload.arrivals


def _times(workload: Workload) -> Column:
    """Arrival times; zeros for a closed loop, whose clients decide as they go."""
    if isinstance(workload.arrivals, ClosedLoop):
        return _zeros()
    return Column(arrival_chunks(workload.arrivals, stream(workload.seed, "arrivals")))


def _thinks(workload: Workload) -> Column:
    """How long a user thinks before each request of a closed loop; zeros where nobody thinks."""
    think = workload.arrivals.think if isinstance(workload.arrivals, ClosedLoop) else None
    return _zeros() if think is None else Column(duration_chunks(think, stream(workload.seed, "thinks")))


def _zeros() -> Column:
    return Column(np.zeros(CHUNK) for _ in count())


def _session_requests(workload: Workload, sessions: SessionPrompts) -> Iterator[Request]:
    assert workload.output_tokens is not None, "conversations have output lengths"
    times, thinks = _times(workload), _thinks(workload)
    most = sys.maxsize if workload.requests is None else workload.requests
    turns = first_turns(sessions, workload.output_tokens, workload.rank_correlation or 0.0, workload.seed, most)
    while first := list(islice(turns, CHUNK)):
        arrivals_s = times.take(len(first)).tolist()
        thinks_s = thinks.take(len(arrivals_s)).tolist()
        # a trace may end before the conversations do
        for request, arrival_s, think_s in zip(first, arrivals_s, thinks_s, strict=False):
            yield replace(request, arrival_s=arrival_s, think_s=think_s)
        if len(arrivals_s) < len(first):
            return


def _with_tokens(request: Request, vocab: int, seed: int) -> Request:
    """`request` and its follow-ups with prompt token ids."""
    given: Request | None = None
    for turn in reversed(list(request.turns())):
        given = replace(turn, prompt_ids=token_ids(turn, vocab, seed), follow_up=given)
    assert given is not None
    return given


def token_ids(request: Request, vocab: int, seed: int) -> tuple[int, ...]:
    """Random token ids; a segment of the prefix has the same ones in every request that shares it."""
    prefix = request.prefix
    if prefix is None:
        rng = stream(seed, f"prompt {request.id}")
        return tuple(rng.integers(0, vocab, request.prompt_tokens).tolist())
    ids: list[int] = []
    for segment, end in zip(prefix.ids, prefix.ends, strict=True):
        ids += stream(seed, f"segment {segment}").integers(0, vocab, end - len(ids)).tolist()
    return tuple(ids[: request.prompt_tokens])


def _text_requests(workload: Workload, file: str) -> Iterator[Request]:
    prompts = load_prompts(file)
    arrivals = _times(workload).take(sys.maxsize if workload.requests is None else workload.requests).tolist()
    thinks = _thinks(workload).take(len(arrivals)).tolist()
    assert workload.output_tokens is not None, "recorded text has output lengths"
    rng = np.random.default_rng(workload.seed)
    outputs = LengthSampler(workload.output_tokens).draw(len(arrivals), rng).tolist()
    order = rng.permutation(len(prompts))
    for i, (arrival_s, think_s, wanted) in enumerate(zip(arrivals, thinks, outputs, strict=True)):
        prompt = prompts[order[i % len(prompts)]]
        if wanted > len(prompt.output_ids):
            raise MemboundError(
                f"workload.output_tokens asks for {wanted} tokens, but the recording of prompt '{prompt.id}' in "
                f"'{file}' holds {len(prompt.output_ids)}; ask for fewer or record more"
            )
        yield Request(
            i,
            arrival_s,
            len(prompt.prompt_ids),
            wanted,
            prompt.prompt_ids,
            prompt.output_ids[:wanted],
            think_s=think_s,
        )
