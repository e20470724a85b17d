"""Which requests did somebody record? One reader for the trace formats that people have.

A format is a container (CSV, JSON lines, a JSON array) and the names of its columns. Files are read as a stream: a
trace of any size takes the memory of one line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from membound.roofline.errors import MemboundError
from membound.roofline.part import MAX_TOKENS
from membound.roofline.reading.problems import kind_of
from membound.roofline.scenario.workload import TraceFile, TraceFormatName
from membound.simulator.scheduling.prefix import PrefixChain

MAX_LINE = 4 * 2**20
READ = 2**18
# Rows of a window that are kept.
_KEPT_ROWS = 2**13
MOONCAKE_BLOCK = 512
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class TraceFormat:
    """Names of a format's columns; its times have `ticks_per_s`, date and time count in microseconds."""

    name: TraceFormatName
    container: Literal["csv", "lines", "array"]
    input: str
    output: str
    time: str | None = None
    ticks_per_s: float = 1.0
    dated: bool = False
    hash_ids: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, in the order of a record's values."""
        return tuple(name for name in (self.input, self.output, self.time, self.hash_ids) if name)


FORMATS = (
    # Azure LLM inference traces 2023 and 2024 (Azure/AzurePublicDataset): the second has a time zone
    TraceFormat("azure", "csv", "ContextTokens", "GeneratedTokens", "TIMESTAMP", 1e6, dated=True),
    # BurstGPT (HPMLL/BurstGPT), all releases; Session ID, Elapsed time, Model and Log Type are not used
    TraceFormat("burstgpt", "csv", "Request tokens", "Response tokens", "Timestamp"),
    # processed traces of vidur (microsoft/vidur)
    TraceFormat("vidur", "csv", "num_prefill_tokens", "num_decode_tokens", "arrived_at"),
    # Mooncake (kvcache-ai/Mooncake): milliseconds, hash ids of 512-token blocks
    TraceFormat("mooncake", "lines", "input_length", "output_length", "timestamp", 1e3, hash_ids="hash_ids"),
    # LLMServingSim (casys-kaist/LLMServingSim): lengths of ShareGPT requests
    TraceFormat("llmservingsim", "lines", "input_toks", "output_toks", "arrival_time_ns", 1e9),
    # ShareGPT: text without times; the first question of a conversation and its answer
    TraceFormat("sharegpt", "array", "question", "answer"),
)


class TraceRow(NamedTuple):
    """A recorded request; `time_s` counts from the beginning of the window, 0 where the format has no times."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: PrefixChain | None


# A row as it stands in the file: its line (or item) and the values of the format's columns, in their order.
_Record = tuple[int, Sequence[Any]]


@dataclass(frozen=True)
class _Source:
    """A file and its format, and how its errors name a place in it."""

    trace: TraceFile
    form: TraceFormat

    def place(self, number: int) -> str:
        unit = "conversation" if self.form.container == "array" else "line"
        return f"trace '{self.trace.file}' {unit} {number}"

    def bad(self, number: int, column: str, value: Any, advice: str) -> MemboundError:
        return MemboundError(f"{self.place(number)}, column {column} is {str(repr(value))[:60]}{advice}")


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
    source = _Source(trace, _format_of(trace, file))
    form = source.form
    _check_options(trace, form)
    first = last = None
    last_s, end_s = 0.0, math.inf if trace.duration_s is None else trace.start_s + trace.duration_s
    some = False
    for number, values in _records(source, file):
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


def _format_of(trace: TraceFile, file: TextIO) -> TraceFormat:
    """The given format, else the one whose columns the first line has."""
    if trace.format != "auto":
        return next(form for form in FORMATS if form.name == trace.format)
    line = file.readline(READ)
    while line and not line.strip():
        line = file.readline(READ)
    if line.lstrip().startswith("{") and len(line) == READ:
        line += file.readline(MAX_LINE)
    file.seek(0)
    line = line.strip()
    if not line:
        raise MemboundError(f"trace '{trace.file}' is empty")
    if "\0" in line:
        raise MemboundError(f"trace '{trace.file}' is no text; give a CSV, JSON or JSON Lines file")
    if line.startswith("version https://git-lfs"):
        raise MemboundError(f"trace '{trace.file}' is a Git LFS pointer, not the data; fetch the file that it names")
    container = {"[": "array", "{": "lines"}.get(line[0], "csv")
    if container == "array" or '"conversations"' in line:
        return next(form for form in FORMATS if form.name == "sharegpt")
    if container == "lines":
        present = list(_parsed(line, trace.file, 1))
    else:
        present = [name.strip() for name in next(csv.reader([line]))]
    for form in FORMATS:
        if form.container == container and set(form.columns) <= set(present):
            return form
    known = "; ".join(f"{form.name}: {', '.join(form.columns)}" for form in FORMATS)
    raise MemboundError(
        f"trace '{trace.file}' line 1 has the columns {', '.join(present)[:200]}, which are those of no known format "
        f"({known})"
    )


def _records(source: _Source, file: TextIO) -> Iterator[_Record]:
    match source.form.container:
        case "csv":
            return _csv_records(source, file)
        case "lines":
            return _line_records(source, file)
        case "array":
            return _conversation_records(source, file)


def _csv_records(source: _Source, file: TextIO) -> Iterator[_Record]:
    form = source.form
    reader = csv.reader(_lines(source.trace, file))
    try:
        header = [name.strip() for name in next(reader, [])]
        if missing := [name for name in form.columns if name not in header]:
            raise MemboundError(
                f"{source.place(1)} lacks the column {missing[0]}, which {form.name} has; "
                f"it has {', '.join(header)[:200] or 'none'}"
            )
        pick, columns = itemgetter(*(header.index(name) for name in form.columns)), len(header)
        for cells in reader:
            if len(cells) == columns:
                yield reader.line_num, pick(cells)
            elif cells:
                raise MemboundError(
                    f"{source.place(reader.line_num)} has {len(cells)} columns, the header has {columns}"
                )
    except csv.Error as error:
        raise MemboundError(f"{source.place(reader.line_num)} is not CSV: {error}") from None


def _line_records(source: _Source, file: TextIO) -> Iterator[_Record]:
    columns = source.form.columns
    for number, line in enumerate(_lines(source.trace, file), start=1):
        if not line.strip():
            continue
        row = _parsed(line, source.trace.file, number)
        try:
            yield number, [row[name] for name in columns]
        except KeyError as error:
            raise MemboundError(f"{source.place(number)} lacks {error.args[0]}, which {source.form.name} has") from None


def _conversation_records(source: _Source, file: TextIO) -> Iterator[_Record]:
    """Tokens of the first question and its answer, from a JSON array of conversations or one on each line."""
    chars_per_token = source.trace.chars_per_token
    assert chars_per_token is not None, "checked with the options"
    for number, item in enumerate(_json_items(source.trace, file), start=1):
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise MemboundError(f"{source.place(number)} has no list 'conversations'")
        try:
            said = [(str(turn["from"]), str(turn["value"])) for turn in turns]
        except (TypeError, KeyError):
            raise MemboundError(f"{source.place(number)} has a turn without 'from' and 'value'") from None
        asked = next((i for i, (who, _) in enumerate(said) if who in ("human", "user")), len(said))
        answered = len(said) > asked + 1 and said[asked + 1][0] not in ("human", "user", "system")
        texts = (said[asked][1], said[asked + 1][1]) if answered else ("", "")
        yield number, [math.ceil(len(text) / chars_per_token) for text in texts]


def _json_items(trace: TraceFile, file: TextIO) -> Iterator[Any]:
    """The items of a JSON array or of JSON lines, holding little more than one of them."""
    decoder = json.JSONDecoder()
    text = file.read(READ).lstrip()
    is_array, number = text.startswith("["), 0
    at, complete = int(is_array), False
    while True:
        at = _separators(text, at)
        if text.startswith("]", at) if is_array else complete and at == len(text):
            return
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            if complete or len(text) - at > 16 * MAX_LINE:
                raise MemboundError(f"trace '{trace.file}' ends within conversation {number + 1}: not JSON") from None
            # twice as much each time, so that a long item is not tried again for each of its pieces
            more = file.read(max(READ, len(text) - at))
            text, at, complete = text[at:] + more, 0, not more
        else:
            number += 1
            yield item


def _separators(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _lines(trace: TraceFile, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise MemboundError(f"trace '{trace.file}' line {number} is longer than {MAX_LINE} characters")
        yield line


def _parsed(line: str, file: str, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise MemboundError(
            f"trace '{file}' line {number} is not a complete JSON object: {line.strip()[:60]!r}"
        ) from None
    if not isinstance(values, dict):
        raise MemboundError(f"trace '{file}' line {number} is {kind_of(values)}, not a JSON object")
    return values


def _token_counts(source: _Source, number: int, values: Sequence[Any]) -> tuple[int, int] | None:
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


def _token_count(source: _Source, number: int, column: str, value: Any) -> int:
    if type(value) is str and len(value) < 8 and value.isdecimal() and value.isascii():
        return int(value)
    tokens = _number(value)
    if not (tokens.is_integer() and 0 <= tokens <= MAX_TOKENS):
        raise source.bad(number, column, value, f": give a whole number from 0 to {MAX_TOKENS}")
    return int(tokens)


def _ticks(source: _Source, number: int, value: Any) -> float:
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


def _prefix(source: _Source, number: int, hash_ids: Any, prompt_tokens: int) -> PrefixChain:
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
