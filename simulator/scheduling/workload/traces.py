"""Which requests did somebody record? A window of a trace as rows of tokens and times, whatever its format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from membound.roofline.errors import MemboundError
from membound.roofline.part import MAX_TOKENS
from membound.roofline.scenario.workload import TraceFile
from membound.simulator.scheduling.prefix import PrefixChain
from membound.simulator.scheduling.workload.trace_formats import READ, Source, TraceFormat, format_of, records

# Rows of a window that are kept.
_KEPT_ROWS = 2**13
MOONCAKE_BLOCK = 512
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TraceRow(NamedTuple):
    """A recorded request; `time_s` counts from the beginning of the window, 0 where the format has no times."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: PrefixChain | None


def read_trace(trace: TraceFile) -> Iterator[TraceRow]:
    """The requests of a trace's window, in order of time.

    Raises MemboundError with file, line, column and value at the first thing that is wrong.
    """
    try:
        with Path(trace.file).open(encoding="utf-8-sig", newline="") as file:
            yield from _rows(trace, file)
    except OSError as error:
        raise MemboundError(f"trace '{trace.file}' cannot be read: {error.strerror}; give the path of a file") from None
    except UnicodeDecodeError:
        raise MemboundError(f"trace '{trace.file}' is not UTF-8 text; give CSV, JSON lines or JSON") from None


# Which bytes a trace's file holds: they may be others after it was written again.
Stamp = tuple[int, int]


def stamp_of(trace: TraceFile) -> Stamp:
    """When the file was written, and its bytes; zeros where there is none, which reading it then says."""
    try:
        found = Path(trace.file).stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def expected_rows(trace: TraceFile) -> float:
    """About how many rows a file has, by its size and its first lines; 0 where it cannot be read, or is no table."""
    try:
        with Path(trace.file).open("rb") as file:
            begin = file.read(READ)
    except OSError:
        return 0.0
    lines = begin.count(b"\n")
    return 0.0 if begin.lstrip().startswith(b"[") or not lines else stamp_of(trace)[1] * lines / len(begin)


def window_rows(trace: TraceFile, most: int) -> Iterator[TraceRow]:
    """At most `most` rows of a trace's window. What is far into a large file is kept, for runs that ask again."""
    if not trace.start_s or most > _KEPT_ROWS:
        return islice(read_trace(trace), most)
    kept = _kept_rows(trace.model_copy(update={"speed": 1.0} if hasattr(trace, "speed") else {}), stamp_of(trace))
    return islice(kept, most)


@lru_cache(maxsize=8)
def _kept_rows(trace: TraceFile, stamp: Stamp) -> tuple[TraceRow, ...]:
    return tuple(islice(read_trace(trace), _KEPT_ROWS))


def _rows(trace: TraceFile, file: TextIO) -> Iterator[TraceRow]:
    source = Source(trace, format_of(trace, file))
    form = source.form
    _check_options(trace, form)
    first = last = None
    last_s, end_s = 0.0, math.inf if trace.duration_s is None else trace.start_s + trace.duration_s
    some = False
    for number, values in records(source, file):
        ticks = 0.0 if form.time is None else _ticks(source, number, values[2])
        if last is not None and ticks < last:
            raise source.bad(number, form.time or "", values[2], ", earlier than the row before; sort the rows by time")
        first, last = ticks if first is None else first, ticks
        last_s = (ticks - first) / form.ticks_per_s
        if last_s >= end_s:
            break
        if last_s < trace.start_s:
            continue
        counts = _token_counts(source, number, values)
        if counts is not None:
            some = True
            prefix = None if form.hash_ids is None else _prefix(source, number, values[3], counts[0])
            yield TraceRow(last_s - trace.start_s, *counts, prefix)
    if last is None:
        raise MemboundError(f"trace '{trace.file}' holds no request")
    if not some:
        raise MemboundError(
            f"trace '{trace.file}' has no request with tokens in the window from start_s {trace.start_s:g} on; its "
            f"rows reach {last_s:g} s"
        )


def _check_options(trace: TraceFile, form: TraceFormat) -> None:
    if form.name == "sharegpt" and trace.chars_per_token is None:
        raise MemboundError(
            f"trace '{trace.file}' is text without token counts; give chars_per_token, for instance 4 for English"
        )
    if form.name != "sharegpt" and trace.chars_per_token is not None:
        raise MemboundError(f"trace '{trace.file}' has token counts, so chars_per_token changes nothing; remove it")
    if form.time is None and (trace.start_s or trace.duration_s is not None or hasattr(trace, "speed")):
        raise MemboundError(
            f"trace '{trace.file}' has no times ({form.name}); use it as prompts, with arrivals of another kind and "
            "without start_s and duration_s"
        )


def _token_counts(source: Source, number: int, values: Sequence[Any]) -> tuple[int, int] | None:
    """Input and output tokens of a row, at least one of each; None for a row that is dropped."""
    form = source.form
    prompt = _token_count(source, number, form.input, values[0])
    output = _token_count(source, number, form.output, values[1])
    if prompt and output:
        return prompt, output
    match source.trace.zero_tokens:
        case "drop":
            return None
        case "one":
            return max(1, prompt), max(1, output)
        case "refuse":
            column = form.output if prompt else form.input
            raise source.bad(
                number,
                column,
                0,
                ", as for a failed request; set zero_tokens to 'drop' to leave such rows out, or to 'one' to count "
                "them as one token",
            )


def _token_count(source: Source, number: int, column: str, value: Any) -> int:
    if type(value) is str and len(value) < 8 and value.isdecimal() and value.isascii():
        return int(value)
    tokens = _number(value)
    if not (tokens.is_integer() and 0 <= tokens <= MAX_TOKENS):
        raise source.bad(number, column, value, f": give a whole number from 0 to {MAX_TOKENS}")
    return int(tokens)


def _ticks(source: Source, number: int, value: Any) -> float:
    column = source.form.time or ""
    if not source.form.dated:
        ticks = _number(value)
        if not 0 <= ticks < math.inf:
            raise source.bad(number, column, value, ": give a number that is not negative")
        return ticks
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        raise source.bad(number, column, value, ": give date and time such as 2023-11-16 18:17:03.979960") from None
    # a time without zone is taken as UTC: only differences count
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _number(value: Any) -> float:
    """The number that a cell or a JSON value is; nan for everything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _prefix(source: Source, number: int, hash_ids: Any, prompt_tokens: int) -> PrefixChain:
    column, blocks = source.form.hash_ids or "", -(-prompt_tokens // MOONCAKE_BLOCK)
    if not isinstance(hash_ids, list) or not all(type(id) is int and 0 <= id < 2**63 for id in hash_ids):
        raise source.bad(number, column, hash_ids, ": give a list of whole numbers")
    if len(hash_ids) != blocks:
        raise MemboundError(
            f"{source.place(number)}, column {column} has {len(hash_ids)} ids, but {prompt_tokens} tokens fill "
            f"{blocks} blocks of {MOONCAKE_BLOCK}"
        )
    ends = (*range(MOONCAKE_BLOCK, prompt_tokens, MOONCAKE_BLOCK), prompt_tokens)
    return PrefixChain(tuple(hash_ids), ends)
